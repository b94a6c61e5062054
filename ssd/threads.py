"""A large order, sorted by several threads: each has the positions behind some of the tokens."""

from __future__ import annotations

import os
from threading import Thread

import numpy as np

from ssd.jit import Int, kernel, peek, poke
from ssd.order import sort_positions

MOST_THREADS = 4
LEAST_POSITIONS = 1 << 20
"""For a thread more: a tenth of a second of sorting."""
SAMPLE = 1023


@kernel(Int, Int, Int, returns=Int)
def split(text, order, size):  # type: ignore[no-untyped-def]
    """Bring those positions of `order[:size]` to the front that stand behind the lesser tokens, about half of them.

    Returns how many they are. The positions behind one token stay together.
    """
    sample = np.empty(SAMPLE, np.uint32)
    for index in range(SAMPLE):
        sample[index] = peek(text, np.int64(peek(order, index * size // SAMPLE)) - 1)
    sample.sort()
    pivot = sample[SAMPLE // 2]
    less = 0
    for index in range(size):
        position = peek(order, index)
        if peek(text, np.int64(position) - 1) < pivot:
            poke(order, index, peek(order, less))
            poke(order, less, position)
            less += 1
    return less


def sort_in_threads(text: int, order: int, size: int, depth: int, threads: int | None = None) -> None:
    """As `sort_positions`, in so many threads; by default one for each processor, at most `MOST_THREADS`."""
    if threads is None:
        threads = min(MOST_THREADS, os.cpu_count() or 1, size // LEAST_POSITIONS)
    if threads <= 1 or size < threads:
        sort_positions(text, order, size, depth)
        return
    front = split(text, order, size)
    back = order + front * np.dtype(np.uint32).itemsize
    beside = Thread(target=sort_in_threads, args=(text, order, front, depth, threads // 2), name="ssd-sort")
    beside.start()
    sort_in_threads(text, back, size - front, depth, threads - threads // 2)
    beside.join()
