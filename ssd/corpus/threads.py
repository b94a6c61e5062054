"""Sort a large suffix array in several threads; each sorts the positions that follow some of the tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ssd.corpus.processors import usable_processors
from ssd.corpus.suffix_array import sort_positions, split

MAX_THREADS = 4
MIN_POSITIONS = 1 << 20
"""Minimum number of positions per thread: a tenth of a second of sorting."""


def sort_in_threads(text: int, suffixes: int, size: int, depth: int, threads: int | None = None) -> None:
    """Call `sort_positions` in `threads` threads; None: one per usable processor, at most `MAX_THREADS`."""
    if threads is None:
        threads = min(MAX_THREADS, len(usable_processors()), size // MIN_POSITIONS)
    parts = _parts(text, suffixes, size, max(1, threads))
    if len(parts) > 1:
        try:
            with ThreadPoolExecutor(len(parts), "ssd-sort") as pool:
                for sorting in [pool.submit(sort_positions, text, *part, depth) for part in parts]:
                    sorting.result()
            return
        except RuntimeError:  # The process cannot have more threads.
            pass
    sort_positions(text, suffixes, size, depth)


def _parts(text: int, suffixes: int, size: int, parts: int) -> list[tuple[int, int]]:
    """Split positions into `parts` parts of similar size; return the address and size of each."""
    if parts == 1 or size < parts:
        return [(suffixes, size)]
    front = split(text, suffixes, size)
    back = suffixes + front * np.dtype(np.uint32).itemsize
    return [*_parts(text, suffixes, front, parts // 2), *_parts(text, back, size - front, parts - parts // 2)]
