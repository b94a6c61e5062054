"""Registers sequences with the service, and sends the ends of finished ones.

A new sequence is sent at once. Lost sequences, as after a restart of the service, are sent in parts, each when the
previous part has been answered, so that no step waits for all of them. A service that has too many tokens drops
sequences; registering them again would make it drop others. So a sequence for which there is no room waits, without
drafts, until others have ended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from itertools import chain, count

import numpy as np

from drafter_service.client.messages import Ended, OutgoingRequest, Registered
from drafter_service.client.pending import PendingRequests
from drafter_service.client.sequences import RunningSequences, UnconfirmedEnd
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import MAX_MESSAGE_BYTES

PART_BYTES = 32 << 10
"""Text sent in one request: the service indexes it in 2 ms, for which the next step waits."""

MAX_TEXT_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
"""Maximum text of a message. A longer sequence has no drafts once the service has lost it."""

GROWTH = 16
"""One part in 16 of the service's capacity is reserved for tokens that the sequences will produce."""

QUEUE_BYTES = 8 << 20
"""Maximum text of queued finished sequences: half a minute of a busy engine's output."""


class Registration:
    """Selects the sequences to send."""

    def __init__(self, running: RunningSequences, pending: PendingRequests) -> None:
        self.discarded = 0
        """Number of finished sequences that were discarded instead of learned."""
        self._running = running
        self._pending = pending
        self._wire_ids = count(1)
        self._max_tokens = math.inf
        self._max_sequences = math.inf
        self._awaited: int | None = None
        """Number of the unanswered request with the last part of running sequences."""
        self._finished: deque[UnconfirmedEnd] = deque()
        """Unsent ends."""
        self._unconfirmed: dict[int, list[UnconfirmedEnd]] = {}
        """Unanswered ends, by request."""
        self._finished_bytes = 0
        """Text of `_finished` and `_unconfirmed`."""

    def begin(self, welcome: pb.Welcome) -> None:
        """Begin a stream, on which no sequence is registered yet."""
        self._max_tokens = welcome.max_tokens or math.inf
        self._max_sequences = welcome.max_sequences or math.inf
        self._awaited = None

    def start(self, row: int) -> None:
        """Send a new sequence now if possible, otherwise later."""
        if self._pending.may_send and len(rows := self._fitting(np.array([row]), math.inf)):
            self._send_running(rows)
        else:
            self._running.has_unregistered = True

    def finish(self, finished: UnconfirmedEnd) -> None:
        """Send the end of a sequence, now or later. If there is no room for it, the oldest ends are discarded."""
        if not (finished.learn or finished.is_registered):
            return
        self._finished.append(finished)
        self._finished_bytes += finished.nbytes
        while self._finished_bytes > QUEUE_BYTES and self._unconfirmed:
            # The service has probably received these.
            self._release(self._unconfirmed.pop(next(iter(self._unconfirmed))))
        while self._finished_bytes > QUEUE_BYTES and len(self._finished) > 1:
            self._discard(self._finished.popleft())
        self.send_finished()

    def answered(self, step: int, lost: Collection[int]) -> int:
        """Record that a request was answered; `lost`: wire ids in it that the service does not have.

        Return the number of running sequences that were lost.
        """
        if step == self._awaited:
            self._awaited = None
        for finished in reversed(self._unconfirmed.pop(step, [])):
            if finished.wire_id in lost and finished.learn:
                finished.unregister()
                self._finished.appendleft(finished)
            else:
                self._release([finished])
        return self._running.unregister(lost) if lost else 0

    def connection_lost(self) -> int:
        """Record that the service has lost all sequences; return the number of running ones that it had."""
        again = [finished for part in self._unconfirmed.values() for finished in part]
        self._unconfirmed.clear()
        self._finished.extendleft(reversed(again))
        for finished in list(self._finished):
            finished.unregister()
            if not finished.learn:
                self._finished.remove(finished)
                self._release([finished])
        return self._running.unregister_all()

    def forget(self, request_id: str) -> None:
        """Prevent learning from sequences of this name, running or finished."""
        self._running.withhold(request_id)
        for finished in [*self._finished, *chain.from_iterable(self._unconfirmed.values())]:
            if finished.info.request_id == request_id:
                finished.learn = False
        for finished in list(self._finished):
            if not (finished.learn or finished.is_registered):
                self._finished.remove(finished)
                self._release([finished])

    def send_running(self) -> None:
        """Send the next part of the unregistered running sequences, if the previous part was answered."""
        if self._running.has_unregistered and self._awaited is None and self._pending.may_send:
            rows = self._running.unregistered()
            if len(rows) and len(fitting := self._fitting(rows, PART_BYTES)):
                self._awaited = self._send_running(fitting)

    def send_finished(self) -> bool:
        """Send as many ends as fit into one request; return whether there were any."""
        if not self._pending.may_send or not self._finished:
            return False
        self._discard_oversized()
        part = self._next_finished()
        if part:
            request = OutgoingRequest()
            for finished in part:
                if not finished.is_registered:
                    finished.wire_id = next(self._wire_ids)
                    request.starts.append(Registered(finished.wire_id, finished.info, finished.committed))
                    finished.is_registered, finished.sent = True, len(finished.committed)
                unsent = finished.committed[finished.sent :]
                request.finishes.append(
                    Ended(finished.wire_id, unsent, finished.learn, finished.verified, finished.steps)
                )
            self._unconfirmed[self._pending.send(request)] = part
        return bool(part)

    def _send_running(self, rows: list[int]) -> int:
        starts = []
        for row in rows:
            wire_id = next(self._wire_ids)
            starts.append(Registered(wire_id, self._running.info(row), self._running.register(row, wire_id)))
        return self._pending.send(OutgoingRequest(starts=starts))

    def _fitting(self, rows: np.ndarray, part_bytes: float) -> list[int]:
        """Return the first of `rows`, int64 [U], for which there is room: about `part_bytes` of text, at least one."""
        sizes = self._running.sizes(rows)
        room: float = MAX_TEXT_BYTES // 4
        free = math.inf
        if not (math.isinf(self._max_tokens) and math.isinf(self._max_sequences)):
            sequences, tokens = self._running.load()
            room = min(room, self._max_tokens - self._max_tokens // GROWTH - tokens)
            free = self._max_sequences - sequences
        chosen: list[int] = []
        nbytes = 0
        for index in (sizes <= room).nonzero()[0].tolist():
            size = int(sizes[index])
            if len(chosen) >= free or (chosen and nbytes + 4 * size > part_bytes):
                break
            if size <= room:
                chosen.append(int(rows[index]))
                nbytes, room = nbytes + 4 * size, room - size
        return chosen

    def _next_finished(self) -> list[UnconfirmedEnd]:
        """Remove the ends to send next from the queue: about `PART_BYTES` of text, at least one if there is room.

        An unregistered sequence waits until there is room to register it.
        """
        room = self._max_tokens
        if not math.isinf(room):
            # Within a request sequences start before others end, so the ends to send do not make room yet.
            registered = sum(finished.size for finished in self._finished if finished.is_registered)
            room -= self._running.load()[1] + registered
        part: list[UnconfirmedEnd] = []
        waiting: list[UnconfirmedEnd] = []
        size = 0
        while self._finished and (not part or size + self._finished[0].unsent_bytes <= PART_BYTES):
            finished = self._finished.popleft()
            if not finished.is_registered and finished.size > room:
                waiting.append(finished)
                continue
            part.append(finished)
            size += finished.unsent_bytes
            room -= 0 if finished.is_registered else finished.size
        self._finished.extendleft(reversed(waiting))
        return part

    def _discard_oversized(self) -> None:
        """Discard sequences that exceed a message or the service's capacity: sending them would break the stream."""
        for finished in list(self._finished):
            fits = finished.is_registered or finished.size <= self._max_tokens
            if finished.unsent_bytes <= MAX_TEXT_BYTES and fits:
                continue
            if finished.is_registered:
                # Its end is sent without the unsent tokens, so that the service drops the sequence.
                self.discarded += finished.learn
                self._finished_bytes -= 4 * (len(finished.committed) - finished.sent)
                finished.learn, finished.committed = False, finished.committed[: finished.sent].copy()
            else:
                self._finished.remove(finished)
                self._discard(finished)

    def _discard(self, finished: UnconfirmedEnd) -> None:
        self.discarded += finished.learn
        self._release([finished])

    def _release(self, part: Iterable[UnconfirmedEnd]) -> None:
        self._finished_bytes -= sum(finished.nbytes for finished in part)
