"""Longest match of a text in the finished requests of a corpus, for reports and benchmarks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types

from ssd.corpus.view import RING_HEAD, RING_SLOTS, View
from ssd.kernels.jit import Int, LongRows, Longs, Tokens, kernel, peek
from ssd.kernels.match import END, FIRST, SPAN_COLUMNS, TIER_SUFFIXES, place_spans, widen

MAX_COMPARED = 64
"""Occurrences in a tier of which the newest is found."""


class Match(NamedTuple):
    """The longest match of a context."""

    length: int
    """Number of the context's last tokens that were found."""
    age: int
    """Number of tokens remembered after its newest occurrence, or the newest of a sample if there are many; -1 if there
    is none."""


@kernel(LongRows, Longs, Tokens, Int, returns=types.UniTuple(Int, 2))
def _search(tiers, ring, context, depth):  # type: ignore[no-untyped-def]
    spans = np.empty((len(tiers), SPAN_COLUMNS), np.int64)
    end, address = len(context), context.ctypes.data
    place_spans(tiers, spans, address, end, min(depth, end))
    length = widen(tiers, spans, address, end)
    age = -1
    for tier in range(len(tiers)):
        found = spans[tier, END] - spans[tier, FIRST]
        if found > 0:
            for place in range(spans[tier, FIRST], spans[tier, END], 1 + found // MAX_COMPARED):
                slot = np.int64(peek(tiers[tier, TIER_SUFFIXES], place))
                own = (ring[RING_HEAD] - slot) % ring[RING_SLOTS]
                age = own if age < 0 else min(age, own)
    return length, age


def longest_match(view: View, context: np.ndarray, depth: int) -> Match:
    """Return the longest match of the last `depth` tokens of a context, uint32 [N]."""
    return Match(*_search(view.arrays.tiers, view.arrays.ring, context, depth))
