"""Let a command end at a point of its choice after Ctrl-C or SIGTERM, so that it can keep what it has."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

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
