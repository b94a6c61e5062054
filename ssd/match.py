"""The longest match of a context among sorted positions, by one binary search.

The search lands where the context itself would be inserted; the longest match is one of the two
neighbours of that place, and everything that matches as far lies around it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types

from ssd.jit import Int, Tokens, TokensOut, inline, kernel


class Match(NamedTuple):
    """Occurrences of the longest match: `order[left:right]`, each preceded by the context's last `length` tokens."""

    left: int
    right: int
    length: int


@inline
def common_length(text, position, context, end, start, depth):  # type: ignore[no-untyped-def]
    """How many tokens before `position` of `text` equal those before `end` of `context`.

    `start` of them are known to; at most `depth` are compared.
    """
    limit = min(depth, min(position, end))
    length = start
    while length < limit and text[position - 1 - length] == context[end - 1 - length]:
        length += 1
    return length


@inline
def key_is_less(text, position, context, end, length, depth):  # type: ignore[no-untyped-def]
    """Whether the key of `position` sorts before the context, given that `length` tokens are common."""
    if length in (depth, end):
        return False
    return length == position or text[position - 1 - length] < context[end - 1 - length]


@inline
def _run_length(text, order, first, direction, available, context, end, length):  # type: ignore[no-untyped-def]
    """How many of `available` positions from `order[first]` on, up or down, match `length` tokens without a gap."""
    inside, step = 0, 1
    while inside + step <= available:
        probe = order[first + direction * (inside + step - 1)]
        if common_length(text, probe, context, end, 0, length) < length:
            break
        inside += step
        step *= 2
    outside = min(available, inside + step - 1)
    while inside < outside:
        middle = (inside + outside) // 2
        if common_length(text, order[first + direction * middle], context, end, 0, length) == length:
            inside = middle + 1
        else:
            outside = middle
    return inside


@kernel(Tokens, Tokens, Int, Tokens, Int, Int, returns=types.UniTuple(Int, 3))
def longest_match(text, order, size, context, end, depth):  # type: ignore[no-untyped-def]
    """The occurrences in `order[:size]` of the longest possible run of tokens before `context[end]`.

    text, order, context: uint32. At most `depth` tokens are compared. Returns (left, right, length) as in
    `Match`; length 0 and an empty range if not even the last token occurs.
    """
    # `order` is sorted, so both bounds' common lengths hold for all between them (Manber and Myers, 1993).
    low, high = 0, size
    low_common, high_common = 0, 0
    while low < high:
        middle = (low + high) // 2
        common = common_length(text, order[middle], context, end, min(low_common, high_common), depth)
        if key_is_less(text, order[middle], context, end, common, depth):
            low, low_common = middle + 1, common
        else:
            high, high_common = middle, common
    # The last comparisons of each bound were with the neighbours of the place found.
    length = max(low_common, high_common)
    if length == 0:
        return 0, 0, 0
    left = low - _run_length(text, order, low - 1, -1, low, context, end, length)
    right = low + _run_length(text, order, low, 1, size - low, context, end, length)
    return left, right, length


@kernel(Tokens, Int, Int, Int, TokensOut, returns=Int)
def sample_positions(order, left, right, limit, positions):  # type: ignore[no-untyped-def]
    """Write at most `limit` of `order[left:right]`, evenly spaced, into `positions`; how many were written."""
    size = right - left
    count = min(size, limit)
    for index in range(count):
        positions[index] = order[left + (2 * index + 1) * size // (2 * count)]
    return count


def find(text: np.ndarray, order: np.ndarray, context: np.ndarray, end: int, depth: int) -> Match:
    """`longest_match` over a whole order, as a `Match`."""
    return Match(*longest_match(text, order, len(order), context, end, depth))
