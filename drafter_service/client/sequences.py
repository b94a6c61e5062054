"""The sequences of a client: their tokens, how much of these the service has, and when the rest is sent.

A sequence is *registered* once its start was sent. It is *behind* if it is not registered, has unsent tokens, or if the
engine's last draft is not the service's last draft for it.

A new sequence is sent at once. After a restart of the service all are sent again in parts, each when the previous part
was answered, so that no step waits for all of them. A service that has too many tokens drops sequences; registering
them again would make it drop others. So a sequence for which there is no room waits, without drafts, until others have
ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from drafter_service.client.pending import Pending, PendingRequests
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
    began: float = field(default_factory=lambda: time.monotonic())
    """When it began, by `time.monotonic`."""
    end_request: Pending | None = None
    """The request with its end; None before it is sent."""

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
        """Return its start, with the tokens that were sent before; the unsent ones follow with the next message."""
        self.wire_id = wire_id
        # A draft that the engine still has belongs to an earlier registration.
        self.is_counted = False
        committed = bytes(self.text[: len(self.text) - self.unsent])
        start = pb.Start(sequence_id=wire_id, committed=committed, age_s=time.monotonic() - self.began)
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
        self.wire_id = self.verified = 0
        self.end_request = None
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
        self._max_sequences = self._max_bytes = math.inf
        """Number of sequences that the service keeps for this client, and of bytes of their tokens when they start."""
        self._last_starts: Pending | None = None
        """The request with the last part of the starts."""
        self._ended: list[RemoteSequence] = []
        """Finished sequences, in order."""
        self._ended_bytes = 0

    def begin(self, welcome: pb.Welcome) -> None:
        """Begin a stream, on which no sequence is registered yet."""
        self._max_sequences = welcome.max_sequences or math.inf
        self._max_bytes = TOKEN_BYTES * (welcome.max_tokens - welcome.max_tokens // GROWTH) or math.inf

    def start(self, sequence_id: int, info: pb.Start) -> None:
        """Add a sequence, and send it now if possible, otherwise later."""
        sequence = self.running[sequence_id] = RemoteSequence(info)
        self.behind.add(sequence)
        self.changes += 1
        self._send_starts([sequence])

    def finish(self, sequence_id: int) -> None:
        """End a sequence, and send that now or later."""
        sequence = self.running.pop(sequence_id)
        self.behind.discard(sequence)
        self.changes += 1
        self.add_finished(sequence)
        self.send_ends()

    def add_finished(self, sequence: RemoteSequence) -> None:
        """Add a sequence that has finished, for `send_ends`. Beyond `QUEUE_BYTES` some are discarded: first those whose
        end was sent, then the oldest."""
        if not (sequence.info.learn or sequence.wire_id):
            return
        self._ended.append(sequence)
        self._ended_bytes += sequence.nbytes
        while self._ended_bytes > QUEUE_BYTES and len(self._ended) > 1:
            sent = (each for each in self._ended[:-1] if each.end_request)  # The service probably has these.
            self._discard(next(sent, self._ended[0]))

    def forget(self, request_id: str) -> None:
        """Prevent learning from sequences of this name, running or finished."""
        for sequence in [*self.running.values(), *self._ended]:
            if sequence.info.request_id == request_id:
                sequence.info.learn = False
        self._drop_useless()

    def answered(self, request: Pending, lost: Collection[int]) -> int:
        """Record that a request was answered; `lost`: wire ids in it that the service does not have.

        Return the number of running sequences that were lost.
        """
        for sequence in [each for each in self._ended if each.end_request is request]:
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
        """Send the next part of the starts, if the previous part was answered."""
        if self.behind and (self._last_starts is None or self._last_starts.is_over):
            self._last_starts = self._send_starts([each for each in self.running.values() if not each.wire_id])

    def _send_starts(self, sequences: Sequence[RemoteSequence]) -> Pending | None:
        """Send the starts of the first sequences for which there is room: about `PART_BYTES` of text, at least one."""
        if not (sequences and self._pending.may_send):
            return None
        free, room = self._room()
        request, size = pb.DraftRequest(), 0
        for sequence in sequences:
            if sequence.nbytes > min(room - size, MAX_TEXT_BYTES):
                continue
            if len(request.starts) >= free or (size and size + sequence.nbytes > PART_BYTES):
                break
            request.starts.append(sequence.register(next(self._wire_ids)))
            size += sequence.nbytes
            if not sequence.unsent and not sequence.offered:
                sequence.is_counted = True
                self.behind.discard(sequence)
        if not request.starts:
            return None
        self.changes += 1
        return self._pending.send(request, size)

    def send_ends(self) -> bool:
        """Send as many ends as fit into one request, about `PART_BYTES` of text; return whether there were any.

        An unregistered sequence starts and ends in the same request, once there is room for it.
        """
        if not self._ended or not self._pending.may_send:
            return False
        free, room = self._room()
        request, size = pb.DraftRequest(), 0
        part: list[RemoteSequence] = []
        for sequence in [each for each in self._ended if not each.end_request]:
            is_new, nbytes = not sequence.wire_id, sequence.unsent_bytes
            if nbytes > (min(MAX_TEXT_BYTES, self._max_bytes) if is_new else MAX_TEXT_BYTES):
                self._discard(sequence)  # It would break the stream.
                continue
            if is_new and (nbytes > room or len(request.starts) >= free):
                continue
            if part and size + nbytes > PART_BYTES:
                break
            part.append(sequence)
            size += nbytes
            if is_new:
                room -= nbytes
                request.starts.append(sequence.register(next(self._wire_ids)))
            request.finishes.append(sequence.end())
        if part:
            pending = self._pending.send(request, size)
            for sequence in part:
                sequence.end_request = pending
        return bool(part)

    def _room(self) -> tuple[float, float]:
        """Return how many more sequences the service keeps, and how many bytes of tokens."""
        kept = [each.nbytes for each in (*self.running.values(), *self._ended) if each.wire_id]
        return self._max_sequences - len(kept), self._max_bytes - sum(kept)

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
