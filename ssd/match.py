"""Matches of a context in a source: the longest one by one binary search, shorter ones around it.

A source is a few tiers, each a text and an order over it, row by row of `tiers`. A search lands where the context
itself would stand; what matches longest is beside that place, and shorter matches lie around it in falling order.
"""

from __future__ import annotations

from ssd.jit import inline, outline, peek
from ssd.order import common_length, place_of

# Columns of tiers, int64: addresses of a text and an order over it, and the order's size.
TIER_TEXT, TIER_ORDER, TIER_SIZE = range(3)

# Columns of spans, int64: first and last + 1 of the occurrences so far; tokens that the context has in common with the
# position before them and with the one behind, 0 once that side is used up.
FIRST, END, BEFORE, BEHIND = range(4)
SPAN_COLUMNS = 4

REACH = 128
"""How far from the context's own place occurrences are looked for, on either side; 512 and 4096 gained nothing."""


@outline
def place_spans(tiers, spans, context, end, depth):  # type: ignore[no-untyped-def]
    """Find where the last `depth` tokens before `end` of `context` would stand in each tier."""
    for tier in range(len(tiers)):
        place, before, behind = place_of(
            tiers[tier, TIER_TEXT], tiers[tier, TIER_ORDER], tiers[tier, TIER_SIZE], context, end, depth
        )
        spans[tier, FIRST], spans[tier, END] = place, place
        spans[tier, BEFORE], spans[tier, BEHIND] = before, behind


@outline
def run_beside(text, order, first, direction, available, context, end, length):  # type: ignore[no-untyped-def]
    """How many of `available` positions from `order[first]` on, up or down, match `length` tokens without a gap."""
    inside, step = 0, 1
    while inside + step <= available:
        probe = peek(order, first + direction * (inside + step - 1))
        if common_length(text, probe, context, end, 0, length) < length:
            break
        inside += step
        step *= 2
    outside = min(available, inside + step - 1)
    while inside < outside:
        middle = (inside + outside) // 2
        probe = peek(order, first + direction * middle)
        if common_length(text, probe, context, end, 0, length) == length:
            inside = middle + 1
        else:
            outside = middle
    return inside


@inline
def _shorter(tier, at, context, end, length):  # type: ignore[no-untyped-def]
    """What the context has in common with the position at `at` of a tier; 0 if that is out of reach."""
    if at < 0 or at >= tier[TIER_SIZE]:
        return 0
    common = common_length(tier[TIER_TEXT], peek(tier[TIER_ORDER], at), context, end, 0, length)
    return common if common < length else 0


@outline
def widen(tiers, spans, context, end):  # type: ignore[no-untyped-def]
    """Widen each tier's span to the next shorter match; returns its length, 0 if nothing is left."""
    length = 0
    for tier in range(len(tiers)):
        length = max(length, spans[tier, BEFORE], spans[tier, BEHIND])
    if length == 0:
        return 0
    for index in range(len(tiers)):
        tier, span = tiers[index], spans[index]
        text, order = tier[TIER_TEXT], tier[TIER_ORDER]
        if span[BEFORE] == length:
            span[FIRST] -= run_beside(text, order, span[FIRST] - 1, -1, min(span[FIRST], REACH), context, end, length)
            span[BEFORE] = _shorter(tier, span[FIRST] - 1, context, end, length)
        if span[BEHIND] == length:
            available = min(tier[TIER_SIZE] - span[END], REACH)
            span[END] += run_beside(text, order, span[END], 1, available, context, end, length)
            span[BEHIND] = _shorter(tier, span[END], context, end, length)
    return length
