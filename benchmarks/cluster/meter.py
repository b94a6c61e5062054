"""Tokens per step over time: samples of the engines' totals, and how they return after a fault."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.cluster.engines import NOTHING, Totals, read_totals, sum_of, tokens_per_step

BEFORE_WINDOWS = 3
"""Windows before a fault with which those after it are compared."""
AFTER_WINDOWS = 2
"""Consecutive windows that together must be near the value before a fault, since single ones vary."""
TOLERANCE = 0.02


class Window(NamedTuple):
    """The period between two samples: about one round of the traffic."""

    began: float
    """Time on the monotonic clock."""
    ended: float
    totals: tuple[Totals, ...]
    """By engine; zeros for one that did not answer."""

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens per step of all engines."""
        return tokens_per_step(sum_of(self.totals))


class Meter:
    """Takes samples of the engines at these ports. Several threads may use it."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = ports
        self._last: list[Totals] | None = None
        self._last_time = 0.0
        self._lock = threading.Lock()
        self.windows: list[Window] = []

    def sample(self) -> None:
        """Read the totals, and add the window since the last sample."""
        with self._lock:
            now = time.monotonic()
            read = [read_totals(port) for port in self._ports]
            last = self._last or [NOTHING] * len(read)
            # An engine that does not answer is counted later, or has lost its counts.
            known = [then if total is None else total for total, then in zip(read, last, strict=True)]
            if self._last is not None:
                parts = tuple(total.since(then) for total, then in zip(known, last, strict=True))
                self.windows.append(Window(self._last_time, now, parts))
            self._last, self._last_time = known, now


class Recovery(NamedTuple):
    """How tokens per step changed with a fault."""

    before: float
    lowest: float
    """The lowest of a single window from the fault until the recovery."""
    after: float
    """Tokens per step in the windows that show the recovery, or in the last ones."""
    seconds: float | None
    """From the end of the fault to the end of the window that shows the recovery; None if there was none."""

    @property
    def ratio(self) -> float:
        """Tokens per step after the fault, relative to those before it."""
        return self.after / self.before


def recovery(windows: Sequence[Window], fault_at: float, healed_at: float) -> Recovery | None:
    """Return how tokens per step recovered; None if there are too few windows."""
    before = [window for window in windows if window.ended <= fault_at][-BEFORE_WINDOWS:]
    later = [window for window in windows if window.ended > fault_at and window.tokens_per_step is not None]
    pairs = [
        later[at : at + AFTER_WINDOWS] for at in range(len(later) - AFTER_WINDOWS + 1) if later[at].began >= healed_at
    ]
    expected = _mean(before)
    if expected is None or not pairs:
        return None
    shown = next((pair for pair in pairs if (_mean(pair) or 0) >= (1 - TOLERANCE) * expected), None)
    pair = shown or pairs[-1]
    until = pair[0].ended
    lowest = min(window.tokens_per_step or 0.0 for window in later if window.ended <= until)
    return Recovery(expected, lowest, _mean(pair) or 0.0, until - healed_at if shown else None)


def _mean(windows: Sequence[Window]) -> float | None:
    return tokens_per_step(sum_of([total for window in windows for total in window.totals]))
