"""The sequences of a client: their tokens, how much of these the service has, and when the rest is sent.

A sequence is *registered* once its start was sent, with the tokens committed until then. It is *behind* if it is not
registered, has unsent tokens, or if the engine's last draft is not the service's last draft for it.

A new sequence is sent at once. Lost ones, as after a restart of the service, are sent in parts, each when the previous
part has been answered, so that no step waits for all of them. A service that has too many tokens drops sequences;
registering them again would make it drop others. So a sequence for which there is no room waits, without drafts, until
others have ended.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import count

from drafter_service.client.pending import PendingRequests
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import MAX_MESSAGE_BYTES

TOKEN_BYTES = 4

PART_BYTES = 32 << 10
"""Text sent in one request: the service indexes it in 2 ms, for which the next step waits."""

MAX_TEXT_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
"""Maximum text of a message. A longer sequence has no drafts once the service has lost it."""

GROWTH = 16
"""One part in 16 of the service's capacity is reserved for tokens that the sequences will produce."""

QUEUE_BYTES = 8 << 20
"""Maximum text of finished sequences that wait: half a minute of a busy engine's output."""


@dataclass(slots=True, eq=False)
class RemoteSequence:
    """A sequence, its committed tokens, and what the service has of it."""

    info: pb.Start
    """Its start, without id and committed tokens; `learn` is cleared once it must not be learned."""
    text: bytearray = field(default_factory=bytearray)
    """All committed tokens, u32."""
    wire_id: int = 0
    """Its id at the service, never used twice, so that no response about an earlier sequence applies to it; 0 if it is
    not registered."""
    unsent: int = 0
    """Number of bytes at the end of `text` that were not sent."""
    offered: int = 0
    """Number of tokens of the draft that the engine received last."""
    is_counted: bool = False
    """Whether that draft is the service's last draft for the sequence."""
    verified: int = 0
    """Number of tokens of the service's last draft that the first of the unsent steps verified; the others had no
    draft."""
    steps: int = 0
    """Number of steps that produced the unsent tokens."""
    end_request: int = 0
    """Number of the request with its end, until that is answered; 0 before it is sent."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tokens, prompt included."""
        return len(self.info.prompt) + len(self.info.hints) + len(self.text)

    @property
    def unsent_bytes(self) -> int:
        """Bytes of its unsent tokens."""
        return self.unsent if self.wire_id else self.nbytes

    def commit(self, tokens: bytes, verified: int, steps: int) -> None:
        """Add tokens, u32, that are sent later."""
        self.text += tokens
        self.unsent += len(tokens)
        if tokens:
            self.steps += max(1, steps)
        if self.is_counted:
            self.verified += verified

    def register(self, wire_id: int) -> pb.Start:
        """Return its start with all tokens, which are counted as sent."""
        self.wire_id = wire_id
        self.take_unsent()
        # A draft that the engine still has belongs to an earlier registration.
        self.is_counted = self.offered == 0
        start = pb.Start(sequence_id=wire_id, committed=bytes(self.text))
        start.MergeFrom(self.info)
        return start

    def take_unsent(self) -> bytes:
        """Return its unsent tokens, u32, which are counted as sent with `verified` and `steps`."""
        unsent = bytes(self.text[len(self.text) - self.unsent :])
        self.unsent = self.verified = self.steps = 0
        self.is_counted = True
        return unsent

    def end(self) -> pb.Finish:
        """Return the end of a registered sequence with its unsent tokens, which are counted as sent."""
        verified, steps = self.verified, self.steps
        return pb.Finish(
            sequence_id=self.wire_id, tokens=self.take_unsent(), learn=self.info.learn, verified=verified, steps=steps
        )

    def unregister(self) -> None:
        """Record that the service has lost the sequence."""
        self.wire_id = self.verified = self.end_request = 0
        self.is_counted = False


class Sequences:
    """The running sequences, and finished ones whose end the service has not confirmed."""

    def __init__(self, pending: PendingRequests) -> None:
        self.running: dict[int, RemoteSequence] = {}
        """By the engine's sequence id, in the order of the starts."""
        self.behind: set[RemoteSequence] = set()
        """Running sequences that are behind."""
        self.changes = 0
        """Number of changes so far of `running`, and of what is registered."""
        self.discarded = 0
        """Number of finished sequences that were discarded instead of learned."""
        self._pending = pending
        self._wire_ids = count(1)
        self._room: float = math.inf
        """Bytes of tokens that the service keeps for this client."""
        self._max_sequences: float = math.inf
        self._awaited: int | None = None
        """Number of the unanswered request with the last part of running sequences."""
        self._ended: list[RemoteSequence] = []
        """Finished sequences, in order."""
        self._ended_bytes = 0

    def begin(self, welcome: pb.Welcome) -> None:
        """Begin a stream, on which no sequence is registered yet."""
        self._room = TOKEN_BYTES * welcome.max_tokens or math.inf
        self._max_sequences = welcome.max_sequences or math.inf
        self._awaited = None

    def start(self, sequence_id: int, info: pb.Start) -> None:
        """Add a sequence, and send it now if possible, otherwise later."""
        sequence = self.running[sequence_id] = RemoteSequence(info)
        self.behind.add(sequence)
        self.changes += 1
        if self._pending.may_send:
            self._send_starts([sequence], math.inf)

    def finish(self, sequence_id: int) -> None:
        """End a sequence, and send that now or later. If there is no room for it, the oldest ends are discarded."""
        sequence = self.running.pop(sequence_id)
        self.behind.discard(sequence)
        self.changes += 1
        if not (sequence.info.learn or sequence.wire_id):
            return
        self._ended.append(sequence)
        self._ended_bytes += sequence.nbytes
        if self._ended_bytes > QUEUE_BYTES:
            # First those that were sent, since the service has probably received them.
            for each in sorted(self._ended[:-1], key=lambda ended: not ended.end_request):
                if self._ended_bytes > QUEUE_BYTES:
                    self._discard(each)
        self.send_ends()

    def forget(self, request_id: str) -> None:
        """Prevent learning from sequences of this name, running or finished."""
        for sequence in [*self.running.values(), *self._ended]:
            if sequence.info.request_id == request_id:
                sequence.info.learn = False
        self._drop_useless()

    def answered(self, step: int, lost: Collection[int]) -> int:
        """Record that a request was answered; `lost`: wire ids in it that the service does not have.

        Return the number of running sequences that were lost.
        """
        if step == self._awaited:
            self._awaited = None
        for sequence in [each for each in self._ended if each.end_request == step]:
            if sequence.wire_id in lost and sequence.info.learn:
                sequence.unregister()
            else:
                self._remove(sequence)
        return self._unregister(each for each in self.running.values() if each.wire_id in lost) if lost else 0

    def connection_lost(self) -> int:
        """Record that the service has lost all sequences; return the number of running ones that it had."""
        for sequence in self._ended:
            sequence.unregister()
        self._drop_useless()
        return self._unregister(each for each in self.running.values() if each.wire_id)

    def send_starts(self) -> None:
        """Send the next part of the unregistered running sequences, if the previous part was answered."""
        if self.behind and self._awaited is None and self._pending.may_send:
            self._awaited = self._send_starts((each for each in self.running.values() if not each.wire_id), PART_BYTES)

    def send_ends(self) -> bool:
        """Send as many ends as fit into one request, about `PART_BYTES` of text; return whether there were any.

        An unregistered sequence starts and ends in the same request, once there is room for it.
        """
        if not self._ended or not self._pending.may_send:
            return False
        # Within a request sequences start before others end, so the ends to send do not make room yet.
        room = self._room - self._load()[1] - sum(each.nbytes for each in self._ended if each.wire_id)
        request, size = pb.DraftRequest(), 0
        part: list[RemoteSequence] = []
        for sequence in [each for each in self._ended if not each.end_request]:
            if sequence.unsent_bytes > MAX_TEXT_BYTES or (not sequence.wire_id and sequence.nbytes > self._room):
                # It would break the stream.
                if not sequence.wire_id:
                    self._discard(sequence)
                    continue
                self.discarded += sequence.info.learn
                sequence.info.learn = False
                self._ended_bytes -= sequence.unsent
                del sequence.text[len(sequence.text) - sequence.unsent :]
                sequence.unsent = 0
            if not sequence.wire_id and sequence.nbytes > room:
                continue
            if part and size + sequence.unsent_bytes > PART_BYTES:
                break
            size += sequence.unsent_bytes
            part.append(sequence)
            if not sequence.wire_id:
                room -= sequence.nbytes
                request.starts.append(sequence.register(next(self._wire_ids)))
            request.finishes.append(sequence.end())
        if part:
            step = self._pending.send(request, size)
            for sequence in part:
                sequence.end_request = step
        return bool(part)

    def _send_starts(self, sequences: Iterable[RemoteSequence], part_bytes: float) -> int | None:
        """Register the first sequences for which there is room: about `part_bytes` of text, at least one.

        Return the number of the request; None if there is no room for any.
        """
        room, free = float(MAX_TEXT_BYTES), math.inf
        if not (math.isinf(self._room) and math.isinf(self._max_sequences)):
            registered, used = self._load()
            room = min(room, self._room - self._room // GROWTH - used)
            free = self._max_sequences - registered
        chosen: list[RemoteSequence] = []
        size = 0
        for sequence in sequences:
            if sequence.nbytes > room - size:
                continue
            if len(chosen) >= free or (chosen and size + sequence.nbytes > part_bytes):
                break
            chosen.append(sequence)
            size += sequence.nbytes
        if not chosen:
            return None
        starts = [each.register(next(self._wire_ids)) for each in chosen]
        step = self._pending.send(pb.DraftRequest(starts=starts), size)
        self.behind.difference_update([each for each in chosen if each.is_counted])
        self.changes += 1
        return step

    def _load(self) -> tuple[int, int]:
        """Return the number of registered running sequences, and an upper bound of their bytes at the service."""
        sizes = [sequence.nbytes for sequence in self.running.values() if sequence.wire_id]
        return len(sizes), sum(sizes)

    def _unregister(self, sequences: Iterable[RemoteSequence]) -> int:
        lost = list(sequences)
        for sequence in lost:
            sequence.unregister()
        self.behind.update(lost)
        self.changes += 1
        return len(lost)

    def _drop_useless(self) -> None:
        """Remove finished sequences that are not learned, and that the service does not have."""
        for sequence in list(self._ended):
            if not (sequence.info.learn or sequence.wire_id):
                self._remove(sequence)

    def _discard(self, sequence: RemoteSequence) -> None:
        self.discarded += sequence.info.learn and not sequence.end_request
        self._remove(sequence)

    def _remove(self, sequence: RemoteSequence) -> None:
        self._ended.remove(sequence)
        self._ended_bytes -= sequence.nbytes
