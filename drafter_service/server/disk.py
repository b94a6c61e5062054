"""What the service does about a disk that fails or does not answer: retries, and calls in threads of their own.

`asyncio.to_thread` has few threads: calls that hang would block all other uses, and the end of the process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import NamedTuple, TypeVar

import structlog

from drafter_service.transport.address import NOT_READY

logger = structlog.get_logger(__name__)

FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 10.0
"""Delay before a namespace is tried again, in seconds: after the first failure, and at most. It doubles each time."""
MAX_FAILURES = 1024
"""Number of namespaces whose failures are remembered."""


class LoadError(RuntimeError):
    """Stored namespaces cannot be read now; their files are as they were, and a later call may succeed."""

    def __init__(self, what: str, problem: object) -> None:
        super().__init__(f"{NOT_READY}{what} cannot be loaded now: {problem}")


class Failure(NamedTuple):
    """The last failure to load a namespace."""

    reason: str
    retry_at: float
    """Time of the clock before which the namespace is not tried again."""
    interval_s: float


class Retries:
    """The failures by namespace."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.failed = 0
        """Number of failures so far."""
        self._clock = clock
        self._failures: dict[str, Failure] = {}

    def check(self, name: str) -> None:
        """Raise LoadError, with the reason of the last failure, if it is too early to try again."""
        failure = self._failures.get(name)
        if failure is not None and (left_s := failure.retry_at - self._clock()) > 0:
            raise LoadError(f"namespace {name!r}", f"{failure.reason}; it is tried again in {left_s:.1f} s")

    def add(self, name: str, problem: BaseException) -> LoadError:
        """Record a failure; return the error for the callers."""
        reason = str(problem) or type(problem).__name__
        last = self._failures.pop(name, None)
        interval_s = min(LONGEST_RETRY_S, 2 * last.interval_s) if last else FIRST_RETRY_S
        self._failures[name] = Failure(reason, self._clock() + interval_s, interval_s)
        if len(self._failures) > MAX_FAILURES:
            del self._failures[next(iter(self._failures))]
        self.failed += 1
        logger.error("namespace not loaded", namespace=name, reason=reason, tried_again_in_s=interval_s)
        return LoadError(f"namespace {name!r}", reason)

    def forget(self, name: str) -> None:
        """Remove the failures of a namespace that was loaded or dropped."""
        self._failures.pop(name, None)


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
