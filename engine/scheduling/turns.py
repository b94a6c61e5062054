"""A lock for calls of several threads."""

from __future__ import annotations

from threading import RLock
from types import TracebackType


class Turns:
    """A reentrant lock that a thread gets after the current holder, even if the holder asks for it again at once.

    With a plain lock, a thread that runs step after step would keep all others out.
    """

    def __init__(self) -> None:
        self._next = RLock()
        """Held by the thread that gets the lock next, so that others wait behind it."""
        self._lock = RLock()

    def __enter__(self) -> None:
        """Wait for the lock."""
        with self._next:
            self._lock.acquire()

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        """Release the lock."""
        self._lock.release()
