"""Evidence for the next token: samples of the occurrences of a context's longest match, and of shorter ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ssd.kernels.jit import inline, outline, peek, prefetch
from ssd.kernels.match import END, FIRST, TIER_SUFFIXES, TIER_TEXT, place_spans, widen
from ssd.kernels.probabilities import LEVELS, SAMPLES

GROWTH = 2
"""A shorter match becomes a level if it has at least this many times the occurrences of the longer one."""
ROUNDS = 6
"""Maximum number of match lengths that are tried to find `LEVELS` levels; 12 gained nothing."""
BLOCK_BITS = 8
"""log2 of the number of slots in a block of the live tier."""
NO_LIVE_TIER = -1
FETCHED_AHEAD = 8
"""Number of tokens after a sample's first one that are prefetched too; half of them are in the next cache line."""


class SearchedText(NamedTuple):
    """A searched text: the shared corpus, or a sequence's own text."""

    tiers: np.ndarray
    """int64 [tiers, 3], see `ssd.kernels.match`."""
    spans: np.ndarray
    """int64 [tiers, 4], scratch."""
    live: int
    """Index of the tier with the text of running requests, or NO_LIVE_TIER."""
    owners: np.ndarray
    """int64: owner of each block of that tier."""
    owner: int
    """Owner of the context; its own text in the live tier is left out."""
    newest: int
    """Newest slot of the other tiers."""
    slots: int
    """Number of slots of the ring."""


class Evidence(NamedTuple):
    """The evidence found so far. Each search finds up to LEVELS levels, longest match first."""

    found_at: np.ndarray
    """int64 [searches]: number of draft tokens that were part of the searched context."""
    lengths: np.ndarray
    """int64 [searches, LEVELS]: tokens matched."""
    totals: np.ndarray
    """int64 [searches, LEVELS]: number of occurrences."""
    counts: np.ndarray
    """int64 [searches, LEVELS]: number of samples, 0 where there is no such level."""
    addresses: np.ndarray
    """int64 [searches, LEVELS, SAMPLES]: address of the token that follows each sample."""
    ages: np.ndarray
    """int64 [searches, LEVELS, SAMPLES]: number of tokens remembered after the sample; below 0 in the live tier."""


def new_evidence(searches: int) -> Evidence:
    """Allocate the arrays for `searches` searches."""
    return Evidence(
        np.zeros(searches, np.int64),
        np.zeros((searches, LEVELS), np.int64),
        np.zeros((searches, LEVELS), np.int64),
        np.zeros((searches, LEVELS), np.int64),
        np.empty((searches, LEVELS, SAMPLES), np.int64),
        np.empty((searches, LEVELS, SAMPLES), np.int64),
    )


@outline
def sample(source, total, addresses, ages):  # type: ignore[no-untyped-def]
    """Sample up to SAMPLES of the `total` occurrences, evenly spaced; return their number."""
    wanted = min(total, SAMPLES)
    written, index, begin = 0, 0, 0
    for tier in range(len(source.tiers)):
        first, size = source.spans[tier, FIRST], source.spans[tier, END] - source.spans[tier, FIRST]
        while index < wanted:
            at = (index if total <= SAMPLES else (2 * index + 1) * total // (2 * SAMPLES)) - begin
            if at >= size:
                break
            index += 1
            position = np.int64(peek(source.tiers[tier, TIER_SUFFIXES], first + at))
            if tier == source.live:
                if source.owners[position >> BLOCK_BITS] == source.owner:
                    continue
                ages[written] = -1
            else:
                age = source.newest - position
                ages[written] = age + source.slots if age < 0 else age
            addresses[written] = source.tiers[tier, TIER_TEXT] + 4 * position
            prefetch(addresses[written])
            prefetch(addresses[written] + 4 * FETCHED_AHEAD)
            written += 1
        begin += size
    return written


@inline
def gather(evidence, search, source, context, end, depth):  # type: ignore[no-untyped-def]
    """Search a source for the text before `end` of `context`, and write the levels of evidence."""
    place_spans(source.tiers, source.spans, context, end, depth)
    gather_placed(evidence, search, source, context, end)


@outline
def gather_placed(evidence, search, source, context, end):  # type: ignore[no-untyped-def]
    """Do the work of `gather` after the spans are placed."""
    for level in range(LEVELS):
        evidence.counts[search, level] = 0
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
        count = sample(source, total, evidence.addresses[search, level], evidence.ages[search, level])
        # The sequence's own text is left out.
        total = total * count // min(total, SAMPLES)
        if count == 0 or total < GROWTH * before:
            continue
        evidence.counts[search, level] = count
        evidence.lengths[search, level] = length
        evidence.totals[search, level] = total
        before = total
        level += 1
        if level == LEVELS:
            break
