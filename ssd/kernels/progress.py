"""Progress of compiling kernels, which takes a minute after an installation; later they are loaded from a cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from numba.core import event

DRAFTER_WORK = 150
"""Work of compiling the drafter's kernels: numba compiles about 110 functions, then optimizes the largest kernel as a
whole, which takes a quarter of the time."""
ENGINE_WORK = 190
"""Work of compiling the kernels of the engine with an embedded drafter."""
LAST = 99
"""Largest reported progress in percent: more functions than expected may be compiled."""
STEP = 10
"""Progress in percent after which `ProgressLines` prints the next line."""


def watched_compilation(report: Callable[[int], None], work: int = DRAFTER_WORK) -> AbstractContextManager[None]:
    """Return a context in which `report` is called with the progress in percent, 0 to 99, when numba compiles.

    Kernels that are loaded from the cache are not reported. work: number of functions compiled at 100 %.
    """
    watched: AbstractContextManager[None] = event.install_listener("numba:compile", _Progress(report, work))
    return watched


class ProgressLines:
    """Writes a line for every `STEP` percent of progress."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._next = 0

    def __call__(self, percent: int) -> None:
        """Record the progress in percent."""
        if percent >= self._next:
            note = "" if self._next else ", once after an installation or update"
            self._write(f"compiling kernels{note}: {percent} %")
            self._next = percent - percent % STEP + STEP


class _Progress(event.Listener):  # type: ignore[misc]
    """Counts the functions that numba has compiled."""

    def __init__(self, report: Callable[[int], None], work: int) -> None:
        self._report = report
        self._work = work
        self._compiled = 0

    def on_start(self, event: Any) -> None:  # noqa: ARG002
        self._report(min(LAST, 100 * self._compiled // self._work))

    def on_end(self, event: Any) -> None:  # noqa: ARG002
        self._compiled += 1
