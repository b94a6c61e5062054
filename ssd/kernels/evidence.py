"""Evidence for the next token: samples of the occurrences of a context's longest match, and of shorter ones."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np

from ssd.corpus.rollout import NO_TAG, TAGGED_BITS
from ssd.kernels.jit import inline, outline, peek, prefetch
from ssd.kernels.match import END, FIRST, TIER_NEWEST, TIER_SLOTS, TIER_SUFFIXES, TIER_TEXT, place_spans, widen
from ssd.kernels.probabilities import LEVELS, OF_GROUP, OF_LIBRARIES, OF_SHORTER, SAMPLES

GROWTH = 2
"""A shorter match becomes a level if it has at least this many times the occurrences of the longer one."""
ROUNDS = 6
"""Maximum number of match lengths that are tried to find `LEVELS` levels; 12 gained nothing."""
BLOCK_BITS = 8
"""log2 of the number of slots in a block of the live tier."""
NO_LIVE_TIER = -1
GROUP_ROUNDS = 12
"""The same for a context of a group, whose longest match may be much shorter than that of all text."""
GROUP_MASK = 255
"""The part of a tag that is the group."""
LIBRARY_FROM = 2
"""Minimum length of a match in libraries; with 1, those of other tasks lost up to 0.7 %."""
OUTSIDE = np.int64(-2)
FETCHED_AHEAD = 8
"""Number of tokens after a sample's first one that are prefetched too; half of them are in the next cache line."""


class SearchedText(NamedTuple):
    """A searched text: the shared corpus, its libraries, or a sequence's own text."""

    tiers: np.ndarray
    """int64 [tiers, TIER_COLUMNS], see `ssd.kernels.match`."""
    spans: np.ndarray
    """int64 [tiers, 4], scratch."""
    live: int
    """Index of the tier with the text of running requests, or NO_LIVE_TIER."""
    owners: np.ndarray
    """int64: owner of each block of that tier, below 0 for one whose text is not used."""
    owner: int
    """Owner of the context; its own text in the live tier is left out."""
    tag: int
    """Tag of the context, see `ssd.corpus.rollout.Rollout.tag`."""
    tags: np.ndarray
    """uint16: tag of each `TAGGED` slots of the ring."""
    live_tags: np.ndarray
    """uint16: tag of each block of the live tier."""


class Evidence(NamedTuple):
    """The evidence found so far. Each search finds up to LEVELS levels, longest match first."""

    found_at: Annotated[np.ndarray, np.int64, "searches"]
    """Number of draft tokens that were part of the searched context."""
    lengths: Annotated[np.ndarray, np.int64, "searches", LEVELS]
    """Tokens matched."""
    totals: Annotated[np.ndarray, np.int64, "searches", LEVELS]
    """Number of occurrences."""
    counts: Annotated[np.ndarray, np.int64, "searches", LEVELS]
    """Number of samples, 0 where there is no such level."""
    addresses: Annotated[np.ndarray, np.int64, "searches", LEVELS, SAMPLES]
    """Address of the token that follows each sample."""
    ages: Annotated[np.ndarray, np.int64, "searches", LEVELS, SAMPLES]
    """Number of tokens remembered after the sample; below 0 in the live tier."""
    second: Annotated[np.ndarray, np.int64, "searches"]
    """Kind of the second level: OF_SHORTER, OF_GROUP or OF_LIBRARIES."""


@inline
def _age(newest, slots, position):  # type: ignore[no-untyped-def]
    """Return the number of tokens after a position, around the ring."""
    age = newest - position
    return age + slots if age < 0 else age


@inline
def _is_hidden(source, position):  # type: ignore[no-untyped-def]
    """Return whether a position of the live tier is the context's own text, or that of a request that has ended."""
    owner = source.owners[position >> BLOCK_BITS]
    return owner < 0 or owner == source.owner


@outline
def sample(source, total, addresses, ages):  # type: ignore[no-untyped-def]
    """Sample up to SAMPLES of the `total` occurrences, evenly spaced; return their number."""
    wanted = min(total, SAMPLES)
    written, index, begin = 0, 0, 0
    for tier in range(len(source.tiers)):
        first, size = source.spans[tier, FIRST], source.spans[tier, END] - source.spans[tier, FIRST]
        newest, slots = source.tiers[tier, TIER_NEWEST], source.tiers[tier, TIER_SLOTS]
        while index < wanted:
            at = (index if total <= SAMPLES else (2 * index + 1) * total // (2 * SAMPLES)) - begin
            if at >= size:
                break
            index += 1
            position = np.int64(peek(source.tiers[tier, TIER_SUFFIXES], first + at))
            if tier == source.live:
                if _is_hidden(source, position):
                    continue
                ages[written] = -1
            else:
                ages[written] = _age(newest, slots, position)
            addresses[written] = source.tiers[tier, TIER_TEXT] + 4 * position
            prefetch(addresses[written])
            prefetch(addresses[written] + 4 * FETCHED_AHEAD)
            written += 1
        begin += size
    return written


@inline
def _age_in_group(source, tier, position):  # type: ignore[no-untyped-def]
    """Return the age of an occurrence; OUTSIDE if it is not of the context's group, or of the sequence itself."""
    if tier == source.live:
        block = position >> BLOCK_BITS
        is_other = np.int64(source.live_tags[block]) & GROUP_MASK != source.tag & GROUP_MASK
        return OUTSIDE if is_other or _is_hidden(source, position) else np.int64(-1)
    if np.int64(source.tags[position >> TAGGED_BITS]) & GROUP_MASK != source.tag & GROUP_MASK:
        return OUTSIDE
    return _age(source.tiers[tier, TIER_NEWEST], source.tiers[tier, TIER_SLOTS], position)


@inline
def _oldest(ages):  # type: ignore[no-untyped-def]
    """Return the index of the oldest sample."""
    oldest = 0
    for index in range(1, len(ages)):
        if ages[index] > ages[oldest]:
            oldest = index
    return oldest


@outline
def sample_group(source, addresses, ages):  # type: ignore[no-untyped-def]
    """Sample the newest SAMPLES occurrences within the group; return their number, and that of all within it."""
    written, total = 0, 0
    for tier in range(len(source.tiers)):
        for at in range(source.spans[tier, FIRST], source.spans[tier, END]):
            position = np.int64(peek(source.tiers[tier, TIER_SUFFIXES], at))
            age = _age_in_group(source, tier, position)
            if age == OUTSIDE:
                continue
            total += 1
            place = written if written < SAMPLES else _oldest(ages)
            if written < SAMPLES:
                written += 1
            elif ages[place] <= age:
                continue
            ages[place], addresses[place] = age, source.tiers[tier, TIER_TEXT] + 4 * position
            prefetch(addresses[place])
            prefetch(addresses[place] + 4 * FETCHED_AHEAD)
    return written, total


@inline
def gather(evidence, search, source, context, end, depth):  # type: ignore[no-untyped-def]
    """Search a source for the text before `end` of `context`, and write the levels of evidence."""
    place_spans(source.tiers, source.spans, context, end, depth)
    gather_placed(evidence, search, source, context, end)


@inline
def _set_level(evidence, search, level, length, total, count):  # type: ignore[no-untyped-def]
    """Write a level of evidence, whose samples are written already."""
    evidence.counts[search, level] = count
    evidence.lengths[search, level] = length
    evidence.totals[search, level] = total


@outline
def gather_placed(evidence, search, source, context, end):  # type: ignore[no-untyped-def]
    """Do the work of `gather` after the spans are placed.

    For a context of a group, the second level is the longest match within the group.
    """
    for level in range(LEVELS):
        evidence.counts[search, level] = 0
    evidence.second[search] = OF_SHORTER
    level, before = 0, 0
    for _ in range(GROUP_ROUNDS if source.tag != NO_TAG else ROUNDS):
        length = widen(source.tiers, source.spans, context, end)
        if length == 0:
            break
        if level == 0 or source.tag == NO_TAG:
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
            _set_level(evidence, search, level, length, total, count)
            before = total
            level += 1
        if source.tag != NO_TAG:
            count, total = sample_group(source, evidence.addresses[search, 1], evidence.ages[search, 1])
            if count > 0:
                _set_level(evidence, search, 1, length, total, count)
                evidence.second[search] = OF_GROUP
                level = LEVELS
        if level == LEVELS:
            break


@outline
def gather_libraries(evidence, search, libraries, context, end, depth):  # type: ignore[no-untyped-def]
    """Make the longest match in the libraries the second level, unless the one in the corpus itself is longer.

    The evidence of the corpus is gathered. That of a group is kept.
    """
    if len(libraries.tiers) == 0 or evidence.second[search] == OF_GROUP:
        return
    place_spans(libraries.tiers, libraries.spans, context, end, depth)
    length = widen(libraries.tiers, libraries.spans, context, end)
    if length < LIBRARY_FROM or (evidence.counts[search, 0] > 0 and length < evidence.lengths[search, 0]):
        return
    total = 0
    for tier in range(len(libraries.tiers)):
        total += libraries.spans[tier, END] - libraries.spans[tier, FIRST]
    count = sample(libraries, total, evidence.addresses[search, 1], evidence.ages[search, 1])
    _set_level(evidence, search, 1, length, total, count)
    evidence.second[search] = OF_LIBRARIES
