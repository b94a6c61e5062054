"""Work in threads behind an iterator, with a bound on what is under way."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, Queue
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

PAUSE_S = 0.05
"""How often a thread that waits looks whether it is to stop."""


class _End:
    """Behind the last item: why there are no more."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def ahead(items: Iterable[A], most: int) -> Generator[A, None, None]:
    """The items, fetched by a thread of their own, `most` and one more of them before they are wanted.

    What fetching raises is raised here. The thread ends when this iterator is closed.
    """
    queue: Queue[A | _End] = Queue(most)
    stopped = threading.Event()

    def fetch() -> None:
        end = _End(None)
        try:
            for item in items:
                queue.put(item)
                if stopped.is_set():
                    break
        except BaseException as error:
            end.error = error
        queue.put(end)

    thread = threading.Thread(target=fetch, name="warm-reader", daemon=True)
    thread.start()
    try:
        while not isinstance(item := queue.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stopped.set()
        while thread.is_alive():
            with suppress(Empty):
                queue.get(timeout=PAUSE_S)


def mapped(function: Callable[[A], B], items: Iterable[A], workers: int) -> Generator[B, None, None]:
    """`function` of each item, in order, computed by so many threads at a time."""
    under_way: deque[Future[B]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="warm-tokenizer") as pool:
        for item in items:
            under_way.append(pool.submit(function, item))
            if len(under_way) > workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
