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
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

import structlog

from drafter_service.client.pending import Pending, PendingRequests
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import MAX_MESSAGE_BYTES, unpack
from ssd.corpus.ring import has_invalid_token

logger = structlog.get_logger(__name__)

TOKEN_BYTES = 4

PART_BYTES = 32 << 10
"""Text sent in one request: the service indexes it in 2 ms, for which the next step waits."""

PART_SEQUENCES = 64
"""Maximum number of finished sequences that one call handles, since the engine may wait for it: 0.4 ms if short."""

MAX_TEXT_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
"""Maximum text of a message. A longer sequence has no drafts once the service has lost it."""

GROWTH = 16
"""One part in 16 of the service's capacity is reserved for tokens that the sequences will produce."""

QUEUE_BYTES = 8 << 20
"""Maximum memory of finished sequences that wait: half a minute of a busy engine's output."""

SEQUENCE_BYTES = 3 << 9
"""Memory of a finished sequence besides its text: 0.7 to 1.4 KB were measured."""


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
    is_refused: bool = False
    """Whether it is not sent any more, because of a token id outside the namespace's vocabulary."""

    @property
    def texts(self) -> tuple[bytes, bytes, bytearray]:
        """All its tokens, u32."""
        return self.info.prompt, self.info.hints, self.text

    @property
    def nbytes(self) -> int:
        """Bytes of its tokens, prompt included."""
        return sum(map(len, self.texts))

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
        """Number of sequences that were discarded instead of learned."""
        self.vocab_size = 0
        """The namespace's; 0 if it is not known, or if all tokens of this client are checked before."""
        self._pending = pending
        self._wire_ids = count(1)
        self._max_sequences = self._max_bytes = math.inf
        """Number of sequences that the service keeps for this client, and of bytes of their tokens when they start."""
        self._last_starts: Pending | None = None
        """The request with the last part of the starts."""
        self._unsent: deque[RemoteSequence] = deque()
        """Finished sequences whose ends were not sent, in order."""
        self._waiting: deque[RemoteSequence] = deque()
        """Older ones that are not registered, since there was no room for them."""
        self._sent: deque[RemoteSequence] = deque()
        """Finished sequences whose ends were sent and not answered, in the order of the requests."""
        self._ended_bytes = 0
        """Bytes of memory of these three."""
        self._kept = self._kept_bytes = 0
        """Number of those that are registered, and bytes of their tokens."""
        self._has_warned = False

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
        """Add a sequence that has finished, for `send_ends`. Beyond `QUEUE_BYTES` others are discarded: first those
        whose end was sent, then the oldest."""
        if not (sequence.info.learn or sequence.wire_id):
            return
        self._count(sequence, 1)
        while self._ended_bytes > QUEUE_BYTES and (self._sent or self._waiting or self._unsent):
            if self._sent or not self.send_ends():  # The service probably has what was sent.
                self._discard((self._sent or self._waiting or self._unsent).popleft())
        self._unsent.append(sequence)

    def forget(self, request_id: str) -> None:
        """Prevent learning from sequences of this name, running or finished."""
        for sequence in (*self.running.values(), *self._sent, *self._waiting, *self._unsent):
            if sequence.info.request_id == request_id:
                sequence.info.learn = False
        self._drop_useless()

    def check_vocabulary(self, sequence: RemoteSequence, *texts: bytes | bytearray) -> bool:
        """Return whether tokens of a sequence, u32, are in the namespace's vocabulary.

        If not, the service would refuse requests with them, so the sequence ends there, and is not sent again.
        """
        if not self.vocab_size or not any(has_invalid_token(unpack(each, "u4", ""), self.vocab_size) for each in texts):
            return True
        if not self._has_warned:
            self._has_warned = True
            logger.warning("text with token ids outside the namespace's vocabulary is not used", size=self.vocab_size)
        self.discarded += sequence.info.learn
        sequence.info.learn, sequence.is_refused = False, True
        if sequence.wire_id:
            self._pending.send(pb.DraftRequest(finishes=[pb.Finish(sequence_id=sequence.wire_id)]))
            self._unregister([sequence])
        return False

    def answered(self, request: Pending, lost: Collection[int]) -> int:
        """Record that a request was answered; `lost`: wire ids in it that the service does not have.

        Return the number of running sequences that were lost.
        """
        again: list[RemoteSequence] = []
        while self._sent and self._sent[0].end_request is request:
            sequence = self._sent.popleft()
            self._count(sequence, -1)
            if sequence.wire_id in lost and sequence.info.learn:
                sequence.unregister()
                self._count(sequence, 1)
                again.append(sequence)
        self._unsent.extendleft(reversed(again))
        return self._unregister(each for each in self.running.values() if each.wire_id in lost) if lost else 0

    def connection_lost(self) -> int:
        """Record that the service has lost all sequences; return the number of running ones that it had."""
        if self._kept:
            self._unsent = deque((*self._sent, *self._waiting, *self._unsent))
            self._sent.clear()
            self._waiting.clear()
            self._kept = self._kept_bytes = 0
            for sequence in self._unsent:
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
            if sequence.is_refused or sequence.nbytes > min(room - size, MAX_TEXT_BYTES):
                continue
            if not self.check_vocabulary(sequence, *sequence.texts):
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
        """Send as many ends as fit into one request, about `PART_BYTES` of text and at most `PART_SEQUENCES`.

        An unregistered sequence starts and ends in the same request, once there is room for it. Return whether any
        sequence was sent, discarded or found to have no room, so that another call may send more.
        """
        if not (self._waiting or self._unsent) or not self._pending.may_send:
            return False
        before = len(self._waiting), len(self._unsent)
        free, room = self._room()
        request, size = pb.DraftRequest(), 0
        part: list[RemoteSequence] = []
        queue = self._waiting
        for _ in range(PART_SEQUENCES):
            queue = queue or self._unsent
            if not queue:
                break
            sequence = queue[0]
            is_new, nbytes = not sequence.wire_id, sequence.unsent_bytes
            if nbytes > (min(MAX_TEXT_BYTES, self._max_bytes) if is_new else MAX_TEXT_BYTES):
                self._discard(queue.popleft())  # It would break the stream.
            elif is_new and (nbytes > room or len(request.starts) >= free):
                if queue is self._unsent:
                    self._waiting.append(queue.popleft())
                queue = self._unsent
            elif part and size + nbytes > PART_BYTES:
                break
            elif is_new and not self.check_vocabulary(sequence, *sequence.texts):
                self._discard(queue.popleft())
            else:
                part.append(queue.popleft())
                size += nbytes
                if is_new:
                    room -= nbytes
                    request.starts.append(sequence.register(next(self._wire_ids)))
                    self._kept += 1
                    self._kept_bytes += nbytes
                request.finishes.append(sequence.end())
        has_changed = before != (len(self._waiting), len(self._unsent))
        if has_changed:  # Also without a part: the response is the next occasion to send one.
            pending = self._pending.send(request, size)
            for sequence in part:
                sequence.end_request = pending
            self._sent += part
        return has_changed

    def send_more_ends(self) -> None:
        """Send the next part of the ends, if all parts before were answered, so that few responses arrive at once."""
        if not self._sent:
            self.send_ends()

    def _room(self) -> tuple[float, float]:
        """Return how many more sequences the service keeps, and how many bytes of tokens."""
        kept = [each.nbytes for each in self.running.values() if each.wire_id]
        return self._max_sequences - self._kept - len(kept), self._max_bytes - self._kept_bytes - sum(kept)

    def _unregister(self, sequences: Iterable[RemoteSequence]) -> int:
        lost = list(sequences)
        for sequence in lost:
            sequence.unregister()
        self.behind.update(lost)
        self.changes += 1
        return len(lost)

    def _drop_useless(self) -> None:
        """Remove finished sequences that are not learned, and that the service does not have."""
        for queue in (self._waiting, self._unsent):
            for _ in range(len(queue)):
                sequence = queue.popleft()
                if sequence.info.learn or sequence.wire_id:
                    queue.append(sequence)
                else:
                    self._count(sequence, -1)

    def _discard(self, sequence: RemoteSequence) -> None:
        """Count a finished sequence that was removed as discarded."""
        self.discarded += sequence.info.learn and not sequence.end_request
        self._count(sequence, -1)

    def _count(self, sequence: RemoteSequence, change: int) -> None:
        """Count a finished sequence that is added (1) or removed (-1)."""
        self._ended_bytes += change * (SEQUENCE_BYTES + sequence.nbytes)
        if sequence.wire_id:
            self._kept += change
            self._kept_bytes += change * sequence.nbytes
