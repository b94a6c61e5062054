"""Progress of compiling kernels, which takes a minute after an installation; later they are loaded from a cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import event

LOG = logging.getLogger(__name__)
DRAFTER_WORK = 280
"""Number of functions that numba compiles for `ssd-drafter precompile`; 240 for the service."""
ENGINE_WORK = 295
"""Number of functions for the engine with an embedded drafter."""
UNREPORTED_S = 2.0
"""Total time of compiling, in seconds, below which nothing is logged."""
LAST = 99
"""Largest reported progress in percent: more functions than expected may be compiled."""
STEP = 10
"""Progress in percent after which `ProgressLines` prints the next line."""


_watched = 0
"""Number of contexts of `watched_compilation` that are open."""
_unwatched_s = 0.0
"""Time of compiling outside of these contexts in this process, in seconds."""


@contextmanager
def watched_compilation(report: Callable[[int], None], work: int = DRAFTER_WORK) -> Iterator[None]:
    """Return a context in which `report` is called with the progress in percent, 0 to 99, when numba compiles.

    Kernels that are loaded from the cache are not reported. work: number of functions compiled at 100 %.
    """
    global _watched
    _watched += 1
    try:
        with event.install_listener("numba:compile", _Progress(report, work)):
            yield
    finally:
        _watched -= 1


def log_compilation(seconds: float) -> None:
    """Add the time of compiling one kernel. If no progress is reported, log one line when the total is long."""
    global _unwatched_s
    before = _unwatched_s
    if not _watched:
        _unwatched_s += seconds
    if before < UNREPORTED_S <= _unwatched_s:
        LOG.warning("compiling kernels, once after an installation or update: this takes up to a minute")


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
