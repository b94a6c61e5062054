"""Suffix arrays of the reversed text: positions sorted by the text before them, read backwards.

Position p of a text is the gap before `text[p]`: its key is text[p-1], text[p-2], ..., its continuation text[p],
text[p+1], ... A key ends at the separator before its request, or after `depth` tokens. Keys do not change when text is
appended, so that new positions are merged into a suffix array instead of sorting everything again; and positions that
follow the same tokens are next to each other.

Texts and suffix arrays (`suffixes`) are given by their addresses, see `ssd.kernels.jit.peek`. Equal keys are in any
order.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import types

from ssd.corpus.processors import usable_processors
from ssd.corpus.ring import SEPARATOR
from ssd.kernels.jit import Bytes, Int, Longs, inline, kernel, outline, peek, poke

INSERTION_FROM = 16
"""Number of positions below which they are sorted by insertion."""

SAMPLE = 1023
"""Number of tokens whose median a split uses."""

MAX_THREADS = 4
MIN_POSITIONS = 1 << 20
"""Minimum number of positions that a thread sorts: a tenth of a second."""

Window = types.UniTuple(Int, 3)
"""Positions that a merge keeps: the first slot, the number of slots from there on, and the number of slots of the ring,
in which they wrap around."""
ALL_POSITIONS = (0, 1 << 40, 1 << 40)
"""The `Window` of a merge that leaves out nothing."""

MergeProgress = types.UniTuple(Int, 3)
"""Numbers of positions that a merge has read from the added ones and from the suffix array, and has written."""


@inline
def common_length(text, position, other_text, other, start, depth):  # type: ignore[no-untyped-def]
    """Return how many tokens before `position` of `text` equal those before `other` of `other_text`.

    `start` of them are known to be equal; at most `depth` are compared; a separator equals nothing.
    """
    length = start
    while length < depth:
        token = peek(text, position - 1 - length)
        if token != peek(other_text, other - 1 - length) or token == SEPARATOR:
            break
        length += 1
    return length


@inline
def key_is_less(text, position, other_text, other, length, depth):  # type: ignore[no-untyped-def]
    """Return whether the key of `position` is less than that of `other`, given that `length` tokens are common."""
    return length < depth and peek(text, position - 1 - length) < peek(other_text, other - 1 - length)


@inline
def _insert_sorted(text, suffixes, first, end, common, depth):  # type: ignore[no-untyped-def]
    """Sort `suffixes[first:end]`, whose keys have `common` tokens in common, by insertion."""
    for index in range(first + 1, end):
        position = peek(suffixes, index)
        place = index
        while place > first:
            before = peek(suffixes, place - 1)
            length = common_length(text, position, text, before, common, depth)
            if not key_is_less(text, position, text, before, length, depth):
                break
            poke(suffixes, place, before)
            place -= 1
        poke(suffixes, place, position)


@inline
def _median_token(text, suffixes, first, end, depth):  # type: ignore[no-untyped-def]
    """Return the median of three tokens at `depth` of the keys of `suffixes[first:end]`."""
    a = peek(text, peek(suffixes, first) - 1 - depth)
    b = peek(text, peek(suffixes, (first + end) // 2) - 1 - depth)
    c = peek(text, peek(suffixes, end - 1) - 1 - depth)
    return max(min(a, b), min(max(a, b), c))


@kernel(Int, Int, Int, Int, returns=types.void)
def sort_positions(text, suffixes, size, depth):  # type: ignore[no-untyped-def]
    """Sort the positions in `suffixes[:size]` by their keys.

    Three-way radix quicksort (Bentley and Sedgewick, 1997), cut at `depth` tokens.
    """
    # (first, end, tokens in common) of each part that is not sorted yet.
    stack = [(0, size, 0)]
    while len(stack) > 0:
        first, end, common = stack.pop()
        while end - first > 1 and common < depth:
            if end - first <= INSERTION_FROM:
                _insert_sorted(text, suffixes, first, end, common, depth)
                break
            pivot = _median_token(text, suffixes, first, end, common)
            less, index, more = first, first, end
            while index < more:
                position = peek(suffixes, index)
                token = peek(text, position - 1 - common)
                if token < pivot:
                    poke(suffixes, index, peek(suffixes, less))
                    poke(suffixes, less, position)
                    less += 1
                    index += 1
                elif token > pivot:
                    more -= 1
                    poke(suffixes, index, peek(suffixes, more))
                    poke(suffixes, more, position)
                else:
                    index += 1
            stack.append((first, less, common))
            stack.append((more, end, common))
            first, end = less, more
            if pivot == SEPARATOR:
                break
            common += 1


@kernel(Int, Int, Int, returns=Int)
def split(text, suffixes, size):  # type: ignore[no-untyped-def]
    """Move the positions of `suffixes[:size]` that follow the smaller tokens to the front, about half of them.

    Returns their number. Positions that follow the same token stay together.
    """
    sample = np.empty(SAMPLE, np.uint32)
    for index in range(SAMPLE):
        sample[index] = peek(text, np.int64(peek(suffixes, index * size // SAMPLE)) - 1)
    sample.sort()
    pivot = sample[SAMPLE // 2]
    less = 0
    for index in range(size):
        position = peek(suffixes, index)
        if peek(text, np.int64(position) - 1) < pivot:
            poke(suffixes, index, peek(suffixes, less))
            poke(suffixes, less, position)
            less += 1
    return less


def sort_in_threads(text: int, suffixes: int, size: int, depth: int, threads: int | None = None) -> None:
    """Call `sort_positions` in several threads, each for the positions that follow some of the tokens.

    threads: their number; None: one per usable processor, at most `MAX_THREADS`.
    """
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


@outline
def place_of(text, suffixes, size, other_text, other, depth):  # type: ignore[no-untyped-def]
    """Return where the key of `other` of `other_text` belongs in `suffixes[:size]`: after all equal keys.

    Returns (place, tokens in common with the key before the place, and with the key at it).
    """
    # `suffixes` is sorted, so what both bounds have in common holds for all between them (Manber and Myers, 1993).
    low, high = 0, size
    low_common, high_common = 0, 0
    while low < high:
        middle = (low + high) // 2
        position = peek(suffixes, middle)
        common = common_length(text, position, other_text, other, min(low_common, high_common), depth)
        if common < depth and peek(other_text, other - 1 - common) < peek(text, position - 1 - common):
            high, high_common = middle, common
        else:
            low, low_common = middle + 1, common
    # The last comparison of each bound was with a neighbor of the place.
    return low, low_common, high_common


@kernel(Int, Int, Int, Int, Int, Longs, Int, Int, returns=types.void)
def find_places(text, suffixes, size, added, first, places, end, depth):  # type: ignore[no-untyped-def]
    """Write where each of the sorted positions `added[first:end]` belongs in `suffixes[:size]`."""
    for index in range(first, end):
        places[index] = place_of(text, suffixes, size, text, peek(added, index), depth)[0]


@inline
def _copy_window(suffixes, first, end, merged, at, window):  # type: ignore[no-untyped-def]
    """Append those of `suffixes[first:end]` that are in the window to `merged[:at]`; return the new size."""
    oldest, alive, slots = window
    for index in range(first, end):
        position = peek(suffixes, index)
        age = np.int64(position) - oldest
        age += slots if age < 0 else 0
        poke(merged, at, position)
        at += 1 if age < alive else 0
    return at


@kernel(Int, Int, Int, Int, Longs, Int, Window, MergeProgress, Int, returns=MergeProgress)
def merge_some(suffixes, size, added, added_size, places, merged, window, progress, most):  # type: ignore[no-untyped-def]
    """Continue merging `suffixes[:size]` and `added[:added_size]` into `merged`, for about `most` positions.

    places: see `find_places`. Returns the new progress; the merge is complete when it has read all positions.
    """
    done, copied, at = progress
    budget = copied + most
    while done < added_size and copied < budget:
        until = min(places[done], budget)
        at = _copy_window(suffixes, copied, until, merged, at, window)
        copied = until
        if copied == places[done]:
            at = _copy_window(added, done, done + 1, merged, at, window)
            done += 1
            budget -= 1
    if done == added_size and copied < budget:
        until = min(size, budget)
        at = _copy_window(suffixes, copied, until, merged, at, window)
        copied = until
    return done, copied, at


@kernel(Int, Int, Int, Int, Int, Int, Int, returns=types.void)
def merge_unsorted(text, suffixes, size, added, added_size, merged, depth):  # type: ignore[no-untyped-def]
    """Sort `added[:added_size]`, and merge it and `suffixes[:size]` into `merged`.

    This is one kernel, because the maintainer takes the GIL after each kernel, which delays drafts.
    """
    sort_positions(text, added, added_size, depth)
    places = np.empty(added_size, np.int64)
    find_places(text, suffixes, size, added, 0, places, added_size, depth)
    merge_some(suffixes, size, added, added_size, places, merged, ALL_POSITIONS, (0, 0, 0), size + added_size)


@kernel(Int, Int, Int, Int, Int, returns=Int)
def usable_positions(ring, first, size, slots, positions):  # type: ignore[no-untyped-def]
    """Write those of `size` slots from `first` on that follow a token; return their number.

    A slot after a separator begins a request: nothing can be matched there.
    """
    count = 0
    for index in range(size):
        slot = first + index
        slot -= slots if slot >= slots else 0
        if peek(ring, slot - 1) != SEPARATOR:
            poke(positions, count, np.uint32(slot))
            count += 1
    return count


@kernel(Int, Int, Bytes, Int, returns=Int)
def keep_positions(suffixes, size, marked, kept):  # type: ignore[no-untyped-def]
    """Copy those of `suffixes[:size]` whose slot is not marked, uint8 [slots], into `kept`; return their number."""
    count = 0
    for index in range(size):
        position = peek(suffixes, index)
        poke(kept, count, position)
        count += 1 if marked[position] == 0 else 0
    return count
