"""Progress of commands that run for minutes, and their end after Ctrl-C or SIGTERM."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_S = 10.0
"""Seconds between two lines of progress where there is no terminal."""


class LongProgress:
    """Shows how many requests, or other units, have ended: a bar on a terminal, otherwise a line every `LINE_S`."""

    def __init__(self, console: Console, total: int, *, transient: bool = False, units: str = "requests") -> None:
        """Make a bar for `total` units. transient: whether the bar disappears at the end."""
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(units),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=transient,
            disable=not console.is_terminal,
        )
        self._console, self._units = console, units
        self._task = self._bar.add_task("", total=total)
        self._printed_s = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, units: int, note: str) -> None:
        """Record that more units have ended; note: what is shown beside their number."""
        self._bar.update(self._task, advance=units, description=note)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._printed_s >= LINE_S:
            self._printed_s = now
            task = self._bar.tasks[self._task]
            self._console.print(f"{task.completed:.0f} of {task.total:.0f} {self._units}: {note}", markup=False)


# --- Interruptions

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedError(Exception):
    """Raised between two steps to end what runs; the text says why."""


class Interruption:
    """The first signal that asks the command to end."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """Number of the signal; None before it arrives."""

    def raise_if_interrupted(self) -> None:
        """End the command if there was a signal, with status 128 + its number, as a shell reports it."""
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is not None:
            sys.exit(128 + self.signal)


@contextmanager
def deferred_interruption() -> Iterator[Interruption]:
    """Return a context in which the first signal is only recorded. A second one has its usual effect."""
    found = Interruption()
    usual = {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)

    def record(number: int, _frame: FrameType | None) -> None:
        found.signal = number
        restore()

    try:
        for number in SIGNALS:
            signal.signal(number, record)
        yield found
    finally:
        restore()
