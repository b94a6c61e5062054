"""A large order, sorted by several threads: each has the positions behind some of the tokens."""

from __future__ import annotations

import os
from threading import Thread

import numpy as np

from ssd.order import sort_positions, split

MOST_THREADS = 4
LEAST_POSITIONS = 1 << 20
"""For a thread more: a tenth of a second of sorting."""


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
