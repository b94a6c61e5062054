"""Run each disk call in a thread of its own, so that a disk that does not answer blocks nothing else.

`asyncio.to_thread` has few threads: calls that hang would block all other uses, and the end of the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import TypeVar

from drafter_service.transport.address import NOT_READY


class LoadError(RuntimeError):
    """Stored namespaces cannot be read now; their files are as they were, and a later call may succeed."""

    def __init__(self, what: str, problem: object) -> None:
        super().__init__(f"{NOT_READY}{what} cannot be loaded now: {problem}")


MAX_THREADS = 64
"""Number of threads of `DiskThreads`. A service has a few unless its disk does not answer."""

T = TypeVar("T")


class DiskThreads:
    """Calls of the file system, each in a thread of its own. Used by one event loop."""

    def __init__(self) -> None:
        self._pending = 0

    def run(self, function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Do as `in_thread`. Raises RuntimeError, too, if `MAX_THREADS` earlier calls have not returned."""
        if self._pending >= MAX_THREADS:
            raise RuntimeError(f"{MAX_THREADS} calls of the file system have not returned")
        result = in_thread(function, *arguments)
        self._pending += 1
        result.add_done_callback(self._ended)
        return result

    def _ended(self, _: asyncio.Future[T]) -> None:
        self._pending -= 1


def in_thread(function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
    """Call a function in a new thread, which does not outlive the process; return its future result.

    Raises RuntimeError if the process cannot have more threads.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            value = function(*arguments)
        except BaseException as problem:
            settle(result.set_exception, problem)
        else:
            settle(result.set_result, value)

    def settle(method: Callable[..., None], value: object) -> None:
        with suppress(RuntimeError):  # The event loop is closed.
            loop.call_soon_threadsafe(unless_cancelled, method, value)

    def unless_cancelled(method: Callable[..., None], value: object) -> None:
        if not result.done():
            method(value)

    Thread(target=run, name=f"ssd-{function.__name__.strip('_')}", daemon=True).start()
    return result


async def finished(work: asyncio.Future[T], limit_s: float, late: Exception) -> T:
    """Return the result of a future or a task, which goes on if the caller is cancelled.

    Raises its exception, and `late` if it has not ended after `limit_s` seconds.
    """
    # If this ends first, nobody else reads an exception.
    work.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    await asyncio.wait([work], timeout=limit_s)
    if not work.done():
        raise late
    return work.result()
