"""Work that may never end, such as calls of a file system that hangs: each call in a thread of its own, with a limit.

`asyncio.to_thread` has few threads: those that hang would block all other uses, and the end of the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


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
            loop.call_soon_threadsafe(lambda: result.done() or method(value))

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
