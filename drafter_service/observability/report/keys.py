"""Waiting for a while, or until a key says to stop."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUIT = (b"q", b"Q", b"")
"""The last of them: the terminal is gone. Ctrl-C interrupts as ever."""

Wait = Callable[[float], bool]
"""Waits so many seconds, less if told to quit; returns whether that was so."""


def wait_without_keys(seconds: float) -> bool:
    """Where nobody can press a key."""
    time.sleep(seconds)
    return False


@contextmanager
def keys() -> Iterator[Wait]:
    """While it lasts, single keys of the terminal are read, and not shown."""
    if not sys.stdin.isatty():
        yield wait_without_keys
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield lambda seconds: _wait(terminal, seconds)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _wait(terminal: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        ready, _, _ = select.select([terminal], [], [], left)
        if ready and os.read(terminal, 1) in QUIT:
            return True
    return False
