"""Sort a large suffix array in several threads; each sorts the positions that follow some of the tokens."""

from __future__ import annotations

from threading import Thread

import numpy as np

from ssd.corpus.processors import usable_processors
from ssd.corpus.suffix_array import sort_positions, split

MAX_THREADS = 4
MIN_POSITIONS = 1 << 20
"""Minimum number of positions per thread: a tenth of a second of sorting."""


class _Sort(Thread):
    """Sorts a part of a suffix array."""

    def __init__(self, text: int, suffixes: int, size: int, depth: int) -> None:
        super().__init__(name="ssd-sort")
        self._given = text, suffixes, size, depth
        self._problem: BaseException | None = None

    def run(self) -> None:
        try:
            sort_positions(*self._given)
        except BaseException as problem:
            self._problem = problem

    def check(self) -> None:
        """Raise the exception that ended the sorting, if any."""
        if self._problem is not None:
            raise self._problem


def sort_in_threads(text: int, suffixes: int, size: int, depth: int, threads: int | None = None) -> None:
    """Call `sort_positions` in `threads` threads; None: one per usable processor, at most `MAX_THREADS`."""
    if threads is None:
        threads = min(MAX_THREADS, len(usable_processors()), size // MIN_POSITIONS)
    *others, own = _parts(text, suffixes, size, max(1, threads))
    started = []
    try:
        for part in others:
            thread = _Sort(text, *part, depth)
            try:
                thread.start()
            except RuntimeError:  # The process cannot have more threads.
                sort_positions(text, *part, depth)
            else:
                started.append(thread)
        sort_positions(text, *own, depth)
    finally:
        for thread in started:
            thread.join()
    for thread in started:
        thread.check()


def _parts(text: int, suffixes: int, size: int, parts: int) -> list[tuple[int, int]]:
    """Split positions into `parts` parts of similar size; return the address and size of each."""
    if parts == 1 or size < parts:
        return [(suffixes, size)]
    front = split(text, suffixes, size)
    back = suffixes + front * np.dtype(np.uint32).itemsize
    return [*_parts(text, suffixes, front, parts // 2), *_parts(text, back, size - front, parts - parts // 2)]
