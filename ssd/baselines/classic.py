"""The baseline drafter: the plain scheme that this project is measured against.

TitanML, "The Next Leap in Speculative Decoding: Inside TitanML's Takeoff Engine": index a circular buffer of finished
requests at an interval; search for the last 10 tokens of the context, then 9, and so on down to 1; of the text after
the matches, cut to the draft's length, take the most frequent continuation.

The buffer and its index are those of `Corpus`. The article sorts the buffer again at each interval; the corpus merges
new text into its index at that interval (`DrafterConfig.refresh_interval_s`), so the matches are the same.
"""

from __future__ import annotations

import numpy as np
from numba import types

from ssd.base import CorpusDrafter
from ssd.config import DrafterConfig
from ssd.corpus.corpus import Corpus
from ssd.corpus.ring import SEPARATOR
from ssd.corpus.suffix_array import common_length, key_is_less, place_of
from ssd.corpus.view import RING_HEAD, RING_SLOTS
from ssd.kernels.jit import Int, LongRows, Longs, TokensOut, inline, kernel, peek
from ssd.kernels.match import TIER_SIZE, TIER_SUFFIXES, TIER_TEXT
from ssd.sequences.tables import SIZE, TEXT, TOTALS
from ssd.types import DraftBatch, Path, Progress

MULTIPLIER = np.uint64(0x9E37_79B9_7F4A_7C15)
"""Odd constant of the hash of a continuation (2**64 divided by the golden ratio)."""
LONGEST = 10
"""Context tokens that are searched for first."""
MOST = 32
"""Matches whose continuations are counted, a sample if there are more."""


class ClassicDrafter(CorpusDrafter):
    """Drafts the most frequent continuation of the longest match in finished requests, at most 10 tokens long.

    Drafts are always paths; `draft_shape` and `cost` have no effect. The scheme estimates no probabilities: the first
    token's `accept_prob` is the continuation's share of the counted matches, that of the others is 1.
    """

    PUBLISHES = False

    def __init__(
        self,
        config: DrafterConfig | None = None,
        *,
        corpus: Corpus | None = None,
        longest: int = LONGEST,
        most: int = MOST,
    ) -> None:
        """Make a drafter over `corpus`, or over a new one, as `CorpusDrafter` does.

        longest, most: as for `most_frequent_continuation`.
        """
        super().__init__(config, corpus=corpus)
        self._longest = min(longest, self.config.match_depth)
        self._most = most

    def _step(self, rows: np.ndarray, progress: Progress) -> DraftBatch:
        progress.check(self.running.offered())
        offsets, limits = progress.offsets.tolist(), progress.max_draft.tolist()
        steps = [1] * len(limits) if progress.steps is None else progress.steps.tolist()
        paths = []
        for index, (row, verified) in enumerate(zip(rows.tolist(), progress.verified.tolist(), strict=True)):
            committed = progress.tokens[offsets[index] : offsets[index + 1]]
            self._commit(row, committed, verified, max(1, steps[index]))
            paths.append(self._draft_path(row, min(limits[index], self.config.max_draft)))
        return DraftBatch.from_paths(paths)

    def _commit(self, row: int, tokens: np.ndarray, verified: int, steps: int) -> None:
        if len(tokens):
            accepted = self._sequences.accepted(row, tokens, verified)
            self.stats.record_path(len(tokens), verified, accepted, steps)
            self._sequences.state[row, TOTALS:] += (steps, len(tokens), verified, accepted)
        self._sequences.extend(row, tokens)

    def _draft_path(self, row: int, limit: int) -> Path:
        """Draft at most `limit` tokens for the sequence of a row, and record them as its last draft."""
        state, view = self._sequences.state[row], self.corpus.view
        draft = np.empty(limit, np.uint32)
        size, _, count, counted = most_frequent_continuation(
            view.arrays.tiers,
            view.arrays.ring,
            int(state[TEXT]),
            int(state[SIZE]),
            self._longest,
            self._most,
            draft,
        )
        draft = draft[:size]
        self._sequences.record_draft(row, draft)
        accept_prob = np.ones(size, np.float32)
        accept_prob[:1] = count / max(1, counted)
        return Path(draft, accept_prob)


@inline
def _first_of_equal(text, suffixes, size, context, end, length):  # type: ignore[no-untyped-def]
    """Return the first place in `suffixes[:size]` with a key not less than that of `context[:end]`, cut at `length`."""
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        position = np.int64(peek(suffixes, middle))
        common = common_length(text, position, context, end, 0, length)
        if key_is_less(text, position, context, end, common, length):
            low = middle + 1
        else:
            high = middle
    return low


@inline
def _continuation_hash(text, position, limit):  # type: ignore[no-untyped-def]
    """Return a 64-bit hash of the tokens from `position` on, up to `limit` of them or to the end of the request."""
    value = np.uint64(0)
    for offset in range(limit):
        token = peek(text, position + offset)
        if token == SEPARATOR:
            break
        # Without the 1, tokens of id 0 would not change a hash of 0.
        value = (value + np.uint64(token) + np.uint64(1)) * MULTIPLIER
        value ^= value >> np.uint64(32)
    return value


@kernel(LongRows, Longs, Int, Int, Int, Int, TokensOut, returns=types.UniTuple(Int, 4))
def most_frequent_continuation(tiers, ring, context, end, longest, most, draft):  # type: ignore[no-untyped-def]
    """Write the most frequent continuation of the longest match of a context into `draft`, uint32 [limit].

    tiers, ring: of a `View`; running requests are left out. context: address of the text; its last `longest` tokens
    before `end` are searched for, then fewer. most: number of matches that are sampled, evenly spaced in the index; 0
    counts all of them. Among equally frequent continuations the one with the most recent match is chosen.
    Continuations are compared by 64-bit hashes. Returns (tokens drafted, tokens matched, matches with that
    continuation, matches counted).
    """
    limit, slots = len(draft), ring[RING_SLOTS]
    length = 0
    for tier in range(len(tiers)):
        _, before, behind = place_of(
            tiers[tier, TIER_TEXT], tiers[tier, TIER_SUFFIXES], tiers[tier, TIER_SIZE], context, end, min(longest, end)
        )
        length = max(length, max(before, behind))
    if length == 0 or limit == 0:
        return 0, 0, 0, 0
    firsts, total = np.empty(len(tiers), np.int64), 0
    ends = np.empty(len(tiers), np.int64)
    for tier in range(len(tiers)):
        text, suffixes, size = tiers[tier, TIER_TEXT], tiers[tier, TIER_SUFFIXES], tiers[tier, TIER_SIZE]
        firsts[tier] = _first_of_equal(text, suffixes, size, context, end, length)
        total += place_of(text, suffixes, size, context, end, length)[0] - firsts[tier]
        ends[tier] = total
    counted = total if most == 0 else min(total, most)
    hashes, positions = np.empty(counted, np.uint64), np.empty(counted, np.int64)
    tier = 0
    for index in range(counted):
        place = (2 * index + 1) * total // (2 * counted)
        while place >= ends[tier]:
            tier += 1
        begun = ends[tier - 1] if tier > 0 else 0
        positions[index] = peek(tiers[tier, TIER_SUFFIXES], firsts[tier] + place - begun)
        hashes[index] = _continuation_hash(tiers[tier, TIER_TEXT], positions[index], limit)
    text = tiers[0, TIER_TEXT]
    by_hash = np.argsort(hashes)
    best, best_count, best_age = 0, 0, slots
    index = 0
    while index < counted:
        value, count, newest, age = hashes[by_hash[index]], 0, 0, slots
        while index < counted and hashes[by_hash[index]] == value:
            position = positions[by_hash[index]]
            if (ring[RING_HEAD] - 1 - position) % slots < age:
                newest, age = position, (ring[RING_HEAD] - 1 - position) % slots
            count += 1
            index += 1
        if count > best_count or (count == best_count and age < best_age):
            best, best_count, best_age = newest, count, age
    drafted = 0
    while drafted < limit and peek(text, best + drafted) != SEPARATOR:
        draft[drafted] = peek(text, best + drafted)
        drafted += 1
    return drafted, length, best_count, counted
