"""Evidence for what comes next: samples of the occurrences of the longest match of a context, and of shorter ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ssd.kernels.jit import inline, outline, peek, prefetch
from ssd.kernels.match import END, FIRST, TIER_ORDER, TIER_TEXT, place_spans, widen
from ssd.kernels.odds import LEVELS, SAMPLES

GROWTH = 2
"""A shorter match is evidence of its own if it has at least so many times the occurrences."""
ROUNDS = 6
"""Shorter matches that are looked at to find `LEVELS` of them; 12 were worth nothing more."""
OWNER_BITS = 8
"""log2 of the slots of a block of the live tier."""
NO_LIVE_TIER = -1


class Source(NamedTuple):
    """Where occurrences come from."""

    tiers: np.ndarray
    """int64 [tiers, 3], see `ssd.kernels.match`."""
    spans: np.ndarray
    """int64 [tiers, 4], scratch."""
    live: int
    """Which tier holds the text of running requests, or NO_LIVE_TIER."""
    owners: np.ndarray
    """int64: whose the blocks of that tier are."""
    owner: int
    """Whose context is matched: its own text in the live tier is no evidence."""
    newest: int
    """The newest slot of the other tiers."""
    slots: int
    """How many slots they go round in."""


class Evidence(NamedTuple):
    """What was found, piece by piece; a piece has up to LEVELS levels, longest match first."""

    found_at: np.ndarray
    """int64 [pieces]: tokens of the draft that were part of the context."""
    lengths: np.ndarray
    """int64 [pieces, LEVELS]: tokens matched."""
    totals: np.ndarray
    """int64 [pieces, LEVELS]: occurrences."""
    counts: np.ndarray
    """int64 [pieces, LEVELS]: how many of them were sampled, 0 where there is no such level."""
    addresses: np.ndarray
    """int64 [pieces, LEVELS, SAMPLES]: where each sample goes on."""
    ages: np.ndarray
    """int64 [pieces, LEVELS, SAMPLES]: tokens that came since; below 0 in the live tier."""


def new_evidence(pieces: int) -> Evidence:
    """Room for so many pieces."""
    return Evidence(
        np.zeros(pieces, np.int64),
        np.zeros((pieces, LEVELS), np.int64),
        np.zeros((pieces, LEVELS), np.int64),
        np.zeros((pieces, LEVELS), np.int64),
        np.empty((pieces, LEVELS, SAMPLES), np.int64),
        np.empty((pieces, LEVELS, SAMPLES), np.int64),
    )


@outline
def sample(source, total, addresses, ages):  # type: ignore[no-untyped-def]
    """Write where up to SAMPLES of the `total` occurrences go on, evenly spaced; returns how many."""
    wanted = min(total, SAMPLES)
    written, index, begin = 0, 0, 0
    for tier in range(len(source.tiers)):
        first, size = source.spans[tier, FIRST], source.spans[tier, END] - source.spans[tier, FIRST]
        while index < wanted:
            at = (index if total <= SAMPLES else (2 * index + 1) * total // (2 * SAMPLES)) - begin
            if at >= size:
                break
            index += 1
            position = np.int64(peek(source.tiers[tier, TIER_ORDER], first + at))
            if tier == source.live:
                if source.owners[position >> OWNER_BITS] == source.owner:
                    continue
                ages[written] = -1
            else:
                age = source.newest - position
                ages[written] = age + source.slots if age < 0 else age
            addresses[written] = source.tiers[tier, TIER_TEXT] + 4 * position
            prefetch(addresses[written])
            written += 1
        begin += size
    return written


@inline
def gather(evidence, piece, source, context, end, depth):  # type: ignore[no-untyped-def]
    """Match what stands before `end` of `context`, and write the levels of evidence that a source has for it."""
    place_spans(source.tiers, source.spans, context, end, depth)
    gather_placed(evidence, piece, source, context, end)


@outline
def gather_placed(evidence, piece, source, context, end):  # type: ignore[no-untyped-def]
    """`gather`, once the spans are placed."""
    for level in range(LEVELS):
        evidence.counts[piece, level] = 0
    level, before = 0, 0
    for _ in range(ROUNDS):
        length = widen(source.tiers, source.spans, context, end)
        if length == 0:
            break
        total = 0
        for tier in range(len(source.tiers)):
            total += source.spans[tier, END] - source.spans[tier, FIRST]
        if total < GROWTH * before:
            continue
        count = sample(source, total, evidence.addresses[piece, level], evidence.ages[piece, level])
        # Less what is the sequence's own.
        total = total * count // min(total, SAMPLES)
        if count == 0 or total < GROWTH * before:
            continue
        evidence.counts[piece, level] = count
        evidence.lengths[piece, level] = length
        evidence.totals[piece, level] = total
        before = total
        level += 1
        if level == LEVELS:
            break
