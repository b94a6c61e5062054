"""Telling the service of running sequences that it does not know: a little at a time, and no more than it has room for.

An engine's new sequence is told at once. What was lost, as by a restart, is told in lots, each when the one before it
was answered, so that steps need not wait behind all of it. A service that has too much lets sequences go; telling those
again would only drive out others. So whatever finds no room waits, without drafts, until others have ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from drafter_service.client.dialogue import Dialogue
from drafter_service.client.messages import MOST_TEXT_BYTES
from drafter_service.client.outgoing import Beginning, Outgoing
from drafter_service.client.running import Running
from drafter_service.stubs import drafter_pb2 as pb

LOT_BYTES = 32 << 10
"""Text told in one message: the service indexes as much in 2 ms, and a step behind it has to wait."""

GROWTH = 16
"""One part in so many of the service's room is left to what the sequences will produce."""


class Introductions:
    """Chooses who is told of next."""

    def __init__(self, running: Running, dialogue: Dialogue, wire_ids: Iterator[int]) -> None:
        self.most_tokens = math.inf
        """That the service has room for, of all sequences."""
        self._most_sequences = math.inf
        self._running = running
        self._dialogue = dialogue
        self._wire_ids = wire_ids
        self._awaited: int | None = None
        """The step of the lot that is not answered yet."""

    def begin(self, welcome: pb.Welcome) -> None:
        """A stream has begun, to a service with this much room; 0: it does not say."""
        self.most_tokens = welcome.most_tokens or math.inf
        self._most_sequences = welcome.most_sequences or math.inf
        self._awaited = None

    def room(self) -> float:
        """How many tokens the service can take in."""
        return self.most_tokens if math.isinf(self.most_tokens) else self.most_tokens - self._running.load()[1]

    def introduce(self, row: int) -> None:
        """Tell of a new sequence now if that is possible, otherwise as of the others."""
        rows = np.array([row])
        if self._dialogue.may_send and len(fitting := self._fitting(rows, math.inf)):
            self._tell(fitting)
        else:
            self._running.want(rows)

    def go_on(self) -> None:
        """Tell of more, if it is time."""
        if self._running.may_want and self._awaited is None and self._dialogue.may_send:
            wanted = self._running.wanted()
            if len(wanted) and len(rows := self._fitting(wanted, LOT_BYTES)):
                self._awaited = self._tell(rows)

    def answered(self, step: int) -> None:
        """A message was answered."""
        if step == self._awaited:
            self._awaited = None

    def _tell(self, rows: list[int]) -> int:
        starts = []
        for row in rows:
            wire_id = next(self._wire_ids)
            starts.append(Beginning(wire_id, self._running.about(row), self._running.introduce(row, wire_id)))
        return self._dialogue.send(Outgoing(starts=starts))

    def _fitting(self, rows: np.ndarray, lot_bytes: float) -> list[int]:
        """The first of `rows`, int64 [W], that there is room for: about so much text, one at least."""
        sizes = self._running.sizes(rows)
        room: float = MOST_TEXT_BYTES // 4
        free = math.inf
        if not (math.isinf(self.most_tokens) and math.isinf(self._most_sequences)):
            sequences, tokens = self._running.load()
            room = min(room, self.most_tokens - self.most_tokens // GROWTH - tokens)
            free = self._most_sequences - sequences
        chosen: list[int] = []
        nbytes = 0
        for index in (sizes <= room).nonzero()[0].tolist():
            size = int(sizes[index])
            if len(chosen) >= free or (chosen and nbytes + 4 * size > lot_bytes):
                break
            if size <= room:
                chosen.append(int(rows[index]))
                nbytes, room = nbytes + 4 * size, room - size
        return chosen
