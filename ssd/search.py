"""A single search, for those who want to know how much of a text the corpus remembers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types

from ssd.jit import Int, LongRows, Tokens, kernel
from ssd.match import END, FIRST, SPAN_COLUMNS, place_spans, widen
from ssd.view import View


class Match(NamedTuple):
    """The longest match of a context."""

    length: int
    """How many of the context's last tokens were found."""
    occurrences: int
    """How often; counted up to some hundreds in each part of the index."""


@kernel(LongRows, Tokens, Int, returns=types.UniTuple(Int, 2))
def _search(tiers, context, depth):  # type: ignore[no-untyped-def]
    spans = np.empty((len(tiers), SPAN_COLUMNS), np.int64)
    end, address = len(context), context.ctypes.data
    place_spans(tiers, spans, address, end, min(depth, end))
    length = widen(tiers, spans, address, end)
    occurrences = 0
    for tier in range(len(tiers)):
        occurrences += spans[tier, END] - spans[tier, FIRST]
    return length, occurrences


def longest_match(view: View, context: np.ndarray, depth: int) -> Match:
    """How many of the last `depth` tokens of a context, uint32 [N], stand in the corpus in a row, and how often."""
    return Match(*_search(view.arrays[0], context, depth))
