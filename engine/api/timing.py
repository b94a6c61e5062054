"""Where the time of each request goes: waiting, reading its prompt, writing its output."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from engine.api.messages import RequestTimes

if TYPE_CHECKING:
    from engine.engine import StepReport
    from engine.scheduling.sequence import Sequence


class Timing:
    """Notes the moments of requests, by the engine's ids; all times are of the monotonic clock."""

    def __init__(self) -> None:
        self._begun: dict[int, float] = {}
        """Those that were not scheduled yet."""
        self._queued: dict[int, float] = {}
        """Seconds that those waited that were."""
        self._scheduled: dict[int, float] = {}
        self._first: dict[int, float] = {}
        self._last = 0.0

    def begun(self, sequence_id: int) -> None:
        """A request was taken."""
        self._begun[sequence_id] = time.monotonic()

    def stepped(self, began: float, running: Iterable[Sequence], report: StepReport) -> None:
        """A step that began then is over; those run that began in it or before, but for those that it ended."""
        self._last = time.monotonic()
        if self._begun:
            for sequence in running:
                self._schedule(sequence.sequence_id, began)
        for result in report.results:
            if result.sequence_id not in self._first:
                self._schedule(result.sequence_id, began)
                self._first[result.sequence_id] = self._last

    def ended(self, sequence_id: int) -> RequestTimes:
        """A request ended with the last step."""
        first = self._first[sequence_id]
        times = RequestTimes(self._queued[sequence_id], first - self._scheduled[sequence_id], self._last - first)
        self.dropped(sequence_id)
        return times

    def dropped(self, sequence_id: int) -> None:
        """A request was cancelled."""
        for moments in (self._begun, self._queued, self._scheduled, self._first):
            moments.pop(sequence_id, None)

    def _schedule(self, sequence_id: int, began: float) -> None:
        """It began then, unless it had before."""
        begun = self._begun.pop(sequence_id, None)
        if begun is not None:
            self._queued[sequence_id] = began - begun
            self._scheduled[sequence_id] = began
