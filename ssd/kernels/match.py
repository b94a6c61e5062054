"""Matches of a context in a source: the longest one by one binary search, shorter ones around it.

A source has one or more tiers, each a text and a suffix array over it, as rows of `tiers`. A search finds the place
where the context itself would be inserted; the longest matches are next to it, and shorter ones follow on both sides.
"""

from __future__ import annotations

import numpy as np

from ssd.corpus.suffix_array import common_length, key_is_less, place_of
from ssd.kernels.jit import inline, outline, peek, prefetch

# Columns of tiers, int64: addresses of a text and its suffix array, the size of the latter, and the newest position of
# the text and the number of its positions, from which ages follow.
TIER_TEXT, TIER_SUFFIXES, TIER_SIZE, TIER_NEWEST, TIER_SLOTS = range(5)
TIER_COLUMNS = 5

# Columns of spans, int64: first and last + 1 of the occurrences so far; tokens that the context has in common with the
# position before them and with the one after them, 0 once that side is exhausted.
FIRST, END, BEFORE, AFTER = range(4)
SPAN_COLUMNS = 4

REACH = 128
"""Maximum number of occurrences that are counted on either side of the context's place; 512 and 4096 gained nothing."""

FETCHED_FROM = 64
"""Size of a search's range above which further steps are prefetched; the suffixes of smaller ones share cache lines."""


@outline
def place_spans(tiers, spans, context, end, depth):  # type: ignore[no-untyped-def]
    """Find where the last `depth` tokens before `end` of `context` would be inserted in each tier."""
    for tier in range(len(tiers)):
        place, before, behind = place_of(
            tiers[tier, TIER_TEXT], tiers[tier, TIER_SUFFIXES], tiers[tier, TIER_SIZE], context, end, depth
        )
        spans[tier, FIRST], spans[tier, END] = place, place
        spans[tier, BEFORE], spans[tier, AFTER] = before, behind


@inline
def _begin(tier, span, end):  # type: ignore[no-untyped-def]
    """Start a binary search over a whole tier; over nothing if there is no context."""
    span[FIRST], span[END] = 0, tier[TIER_SIZE] if end > 0 else 0
    span[BEFORE], span[AFTER] = 0, 0


@inline
def _fetch_next(text, suffixes, first, middle, end):  # type: ignore[no-untyped-def]
    """Prefetch what the next step of a binary search compares in either half, and the suffixes of the step after it."""
    prefetch(text + 4 * (np.int64(peek(suffixes, (first + middle) // 2)) - 1))
    prefetch(text + 4 * (np.int64(peek(suffixes, (middle + 1 + end) // 2)) - 1))
    eighth = (end - first) // 8
    for odd in range(1, 8, 2):
        prefetch(suffixes + 4 * (first + odd * eighth))


@inline
def _narrow(tier, span, context, end, depth):  # type: ignore[no-untyped-def]
    """Halve the range of a binary search, as `place_of` does."""
    text, middle = tier[TIER_TEXT], (span[FIRST] + span[END]) // 2
    position = np.int64(peek(tier[TIER_SUFFIXES], middle))
    common = common_length(text, position, context, end, min(span[BEFORE], span[AFTER]), depth)
    if key_is_less(context, end, text, position, common, depth):
        span[END], span[AFTER] = middle, common
    else:
        span[FIRST], span[BEFORE] = middle + 1, common


@outline
def place_all(tiers, spans, contexts, depth):  # type: ignore[no-untyped-def]
    """Do `place_spans` for many contexts, interleaved: memory that one search needs is prefetched during the others.

    spans: int64 [B, tiers, SPAN_COLUMNS]. contexts: int64 [B, 2], addresses and ends; nothing is found for an end of 0.
    """
    for number in range(len(tiers)):
        tier = tiers[number]
        for index in range(len(contexts)):
            _begin(tier, spans[index, number], contexts[index, 1])
        left = tier[TIER_SIZE]
        while left > 0:
            for index in range(len(contexts)):
                span = spans[index, number]
                if span[FIRST] < span[END]:
                    middle = (span[FIRST] + span[END]) // 2
                    prefetch(tier[TIER_TEXT] + 4 * (np.int64(peek(tier[TIER_SUFFIXES], middle)) - 1))
                    if span[END] - span[FIRST] > FETCHED_FROM:
                        _fetch_next(tier[TIER_TEXT], tier[TIER_SUFFIXES], span[FIRST], middle, span[END])
            for index in range(len(contexts)):
                span = spans[index, number]
                if span[FIRST] < span[END]:
                    _narrow(tier, span, contexts[index, 0], contexts[index, 1], depth)
            left //= 2


@outline
def count_matching(text, suffixes, first, direction, available, context, end, length):  # type: ignore[no-untyped-def]
    """Return how many of `available` positions from `suffixes[first]` on, up or down, match `length` tokens."""
    inside, step = 0, 1
    while inside + step <= available:
        probe = peek(suffixes, first + direction * (inside + step - 1))
        if common_length(text, probe, context, end, 0, length) < length:
            break
        inside += step
        step *= 2
    outside = min(available, inside + step - 1)
    while inside < outside:
        middle = (inside + outside) // 2
        probe = peek(suffixes, first + direction * middle)
        if common_length(text, probe, context, end, 0, length) == length:
            inside = middle + 1
        else:
            outside = middle
    return inside


@inline
def _shorter(tier, at, context, end, length):  # type: ignore[no-untyped-def]
    """Return the number of tokens that the context has in common with position `at` of a tier; 0 outside the tier."""
    if at < 0 or at >= tier[TIER_SIZE]:
        return 0
    common = common_length(tier[TIER_TEXT], peek(tier[TIER_SUFFIXES], at), context, end, 0, length)
    return common if common < length else 0


@outline
def widen(tiers, spans, context, end):  # type: ignore[no-untyped-def]
    """Widen each tier's span to the next shorter match; return its length, 0 if there is none."""
    length = 0
    for tier in range(len(tiers)):
        length = max(length, spans[tier, BEFORE], spans[tier, AFTER])
    if length == 0:
        return 0
    for index in range(len(tiers)):
        tier, span = tiers[index], spans[index]
        text, suffixes = tier[TIER_TEXT], tier[TIER_SUFFIXES]
        if span[BEFORE] == length:
            span[FIRST] -= count_matching(
                text, suffixes, span[FIRST] - 1, -1, min(span[FIRST], REACH), context, end, length
            )
            span[BEFORE] = _shorter(tier, span[FIRST] - 1, context, end, length)
        if span[AFTER] == length:
            available = min(tier[TIER_SIZE] - span[END], REACH)
            span[END] += count_matching(text, suffixes, span[END], 1, available, context, end, length)
            span[AFTER] = _shorter(tier, span[END], context, end, length)
    return length
