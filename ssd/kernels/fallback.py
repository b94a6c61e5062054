"""Fallback candidates: tokens that may follow where every candidate of the evidence is wrong.

When the target produces a token that was not among a node's candidates, the token is counted for three contexts: none,
the token before the last one, and the two tokens before the last one. The last token is left out, because what followed
it elsewhere is in the evidence. The probability that a node's candidates leave is divided among the tokens of its
contexts, like the probability of an escape symbol in prediction by partial matching (Cleary and Witten, "Data
compression using adaptive coding and partial string matching", 1984).
"""

from __future__ import annotations

import os
from typing import Annotated, NamedTuple
from weakref import WeakSet

import numpy as np

from ssd.kernels.arrays import allocate
from ssd.kernels.jit import (
    Int,
    Nothing,
    TokenRows,
    Tokens,
    TokensOut,
    acquire,
    inline,
    kernel,
    outline,
    peek,
    prefetch,
    release,
)
from ssd.kernels.probabilities import (
    FALLBACK_CONTEXTS,
    FALLBACK_RANKS,
    MEAN,
    SEEN_CAP,
    fallback_cell,
    learn_cell,
)

SLOTS, SLOTS_WITHOUT_CONTEXT = 8, 32
"""Number of tokens that are counted for a context."""
CONTEXT_BITS = (0, 12, 14)
"""Number of bits of the hashes of contexts of 0, 1 and 2 tokens; contexts with equal hashes share their counts."""
FIRST_SLOTS = (0, SLOTS_WITHOUT_CONTEXT, SLOTS_WITHOUT_CONTEXT + (SLOTS << CONTEXT_BITS[1]))
TOTAL_SLOTS = FIRST_SLOTS[2] + (SLOTS << CONTEXT_BITS[2])
MAX_FOUND = 12
"""Maximum number of fallback candidates of a node."""
MAX_COUNT = 1000
"""All counts of a context are halved when one exceeds this, so that they follow changes of the traffic."""

SLOT_TOKEN, SLOT_TIMES = range(2)
"""Columns of slots."""
SLOT_BYTES = 8


class FoundFallbacks(NamedTuple):
    """The fallback candidates of one node."""

    tokens: Annotated[np.ndarray, np.uint32, MAX_FOUND]
    probs: Annotated[np.ndarray, np.float32, MAX_FOUND]


class Fallback(NamedTuple):
    """The counted tokens, in descending order of their counts for each context."""

    slots: Annotated[np.ndarray, np.uint32, TOTAL_SLOTS, 2]
    """A slot is empty if its count is 0."""
    lock: Annotated[np.ndarray, np.uint32, 1]
    """Held by the thread that changes the slots or the learned tables of the corpus. Readers take no lock:
    they may see a token twice, or an old count."""


@inline
def first_slot(text, end, context):  # type: ignore[no-untyped-def]
    """Return the first slot of the context of `context` tokens that ends before the last token, -1 if there is none."""
    if end <= context:
        return np.int64(-1)
    if context == 0:
        return np.int64(0)
    key = (np.uint64(peek(text, end - 2)) + np.uint64(1)) * np.uint64(2654435761)
    if context == 2:
        key += (np.uint64(peek(text, end - 3)) + np.uint64(1)) * np.uint64(0x9E3779B1CD)
    hashed = (key * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - CONTEXT_BITS[context])
    return FIRST_SLOTS[context] + SLOTS * np.int64(hashed)


@inline
def fetch_slots(fallback, text, end):  # type: ignore[no-untyped-def]
    """Prefetch the slots of the contexts before `end` of a text, whose table is too large for the cache."""
    for context in range(1, FALLBACK_CONTEXTS):
        first = first_slot(text, end, context)
        if first >= 0:
            for slot in (first, first + SLOTS - 1):
                prefetch(fallback.slots.ctypes.data + SLOT_BYTES * slot)


@inline
def _is_empty(fallback, slot):  # type: ignore[no-untyped-def]
    return fallback.slots[slot, SLOT_TIMES] == 0


@outline
def _count(fallback, first, slots, token):  # type: ignore[no-untyped-def]
    """Count a token of one context; without an empty slot, it replaces the last one."""
    place = first
    while place < first + slots - 1 and not _is_empty(fallback, place) and fallback.slots[place, SLOT_TOKEN] != token:
        place += 1
    count = np.uint32(1)
    if not _is_empty(fallback, place) and fallback.slots[place, SLOT_TOKEN] == token:
        count += fallback.slots[place, SLOT_TIMES]
    # The newest of several tokens with equal counts comes first.
    while place > first and (_is_empty(fallback, place - 1) or fallback.slots[place - 1, SLOT_TIMES] <= count):
        fallback.slots[place] = fallback.slots[place - 1]
        place -= 1
    slot = fallback.slots[place]
    slot[SLOT_TOKEN], slot[SLOT_TIMES] = token, count
    if count > MAX_COUNT:
        for at in range(first, first + slots):
            fallback.slots[at, SLOT_TIMES] = (fallback.slots[at, SLOT_TIMES] + 1) // 2


@outline
def _uncount(fallback, first, slots, token):  # type: ignore[no-untyped-def]
    """Reduce the count of a token of one context by one."""
    place, end = first, first + slots
    while place < end and (_is_empty(fallback, place) or fallback.slots[place, SLOT_TOKEN] != token):
        place += 1
    if place == end:
        return
    count = fallback.slots[place, SLOT_TIMES] - np.uint32(1)
    while place + 1 < end and not _is_empty(fallback, place + 1) and fallback.slots[place + 1, SLOT_TIMES] > count:
        fallback.slots[place] = fallback.slots[place + 1]
        place += 1
    slot = fallback.slots[place]
    slot[SLOT_TOKEN], slot[SLOT_TIMES] = token, count


@kernel(TokenRows, TokensOut, Tokens, Int, returns=Nothing)
def uncount_output(slots, lock, tokens, first):  # type: ignore[no-untyped-def]
    """Reduce the counts of `tokens[first:]`, uint32, in all of their contexts.

    Which of them were counted is not known, so counts of the same tokens by other sequences may be reduced, too.
    """
    fallback, text = Fallback(slots, lock), tokens.ctypes.data
    for end in range(first, len(tokens)):
        acquire(lock)
        for context in range(FALLBACK_CONTEXTS):
            start = first_slot(text, end, context)
            if start >= 0:
                _uncount(fallback, start, SLOTS if context else SLOTS_WITHOUT_CONTEXT, tokens[end])
        release(lock)


@kernel(TokenRows, TokensOut, returns=Nothing)
def erase(slots, lock):  # type: ignore[no-untyped-def]
    """Remove all tokens."""
    acquire(lock)
    slots[:] = 0
    release(lock)


@inline
def _is_among(candidates, candidate_count, token):  # type: ignore[no-untyped-def]
    """Return whether a token is one of the first `candidate_count` candidates."""
    is_among = False
    for index in range(candidate_count):
        is_among = is_among or np.uint32(candidates[index, 0]) == token
    return is_among


@inline
def _total(fallback, first):  # type: ignore[no-untyped-def]
    """Return the sum of the largest counts of a context."""
    total = np.int64(0)
    for slot in range(first, first + SLOTS):
        total += 0 if _is_empty(fallback, slot) else fallback.slots[slot, SLOT_TIMES]
    return total


@outline
def learn_missed(model, candidates, candidate_count, text, end, token, is_counted):  # type: ignore[no-untyped-def]
    """Learn from a token that the target produced after the text before `end`, and that no candidate had predicted.

    is_counted: whether other sequences may be offered the token.
    """
    fallback = model.fallback
    for context in range(FALLBACK_CONTEXTS):
        first, slots, rank = first_slot(text, end, context), SLOTS if context else SLOTS_WITHOUT_CONTEXT, 0
        if first < 0:
            break
        total = _total(fallback, first)
        for slot in range(first, first + slots):
            if _is_empty(fallback, slot) or rank == FALLBACK_RANKS:
                break
            known = fallback.slots[slot, SLOT_TOKEN]
            if _is_among(candidates, candidate_count, known):
                continue
            cell = fallback_cell(context, rank, np.int64(fallback.slots[slot, SLOT_TIMES]), total)
            rank += 1
            outcome = np.float32(1.0) if known == token else np.float32(0.0)
            learn_cell(model.learned.cells, model.learned.logits, cell, outcome, SEEN_CAP)
        if is_counted:
            _count(fallback, first, slots, token)


@inline
def _keep(found, count, token, prob):  # type: ignore[no-untyped-def]
    """Keep a token with the largest of its probabilities, if there is room; return the number of tokens."""
    for place in range(count):
        if found.tokens[place] == token:
            found.probs[place] = max(found.probs[place], prob)
            return count
    if count == MAX_FOUND:
        return count
    found.tokens[count], found.probs[count] = token, prob
    return count + 1


@outline
def find_fallbacks(found, model, candidates, candidate_count, text, end, left, least):  # type: ignore[no-untyped-def]
    """Write a node's fallback candidates into `found`, a `FoundFallbacks`; return their number.

    candidate_count: number of the node's other candidates. text, end: the text that ends at the node. left:
    probability that none of the other candidates is right. least: minimum probability.
    """
    fallback, count = model.fallback, 0
    for context in range(FALLBACK_CONTEXTS - 1, -1, -1):
        first, slots, rank = first_slot(text, end, context), SLOTS if context else SLOTS_WITHOUT_CONTEXT, 0
        if first < 0:
            continue
        total = _total(fallback, first)
        for slot in range(first, first + slots):
            if _is_empty(fallback, slot) or rank == FALLBACK_RANKS:
                break
            token = fallback.slots[slot, SLOT_TOKEN]
            if _is_among(candidates, candidate_count, token):
                continue
            cell = fallback_cell(context, rank, np.int64(fallback.slots[slot, SLOT_TIMES]), total)
            rank += 1
            prob = left * model.learned.cells[cell, MEAN]
            # The next ones are less frequent.
            if prob < least:
                break
            count = _keep(found, count, token, prob)
    total_prob = np.float32(0.0)
    for place in range(count):
        total_prob += found.probs[place]
    if total_prob > left:
        for place in range(count):
            found.probs[place] *= left / total_prob
    return count


_TABLES: WeakSet[FallbackTable] = WeakSet()


class FallbackTable:
    """Counts of the tokens that the evidence lacked, for all sequences that share a corpus."""

    def __init__(self, now: float) -> None:
        """Make an empty table; now: the time by the corpus's clock."""
        self.arrays = allocate(Fallback)
        self.since = now
        """When the table was made or last erased."""
        _TABLES.add(self)

    def erase(self, now: float) -> None:
        """Remove all tokens."""
        erase(*self.arrays)
        self.since = now

    def remove_output(self, tokens: np.ndarray, first: int) -> None:
        """Remove what a sequence with the text `tokens`, uint32 [N], has counted; its output begins at `first`."""
        uncount_output(*self.arrays, tokens, first)

    @property
    def nbytes(self) -> int:
        """Memory of the table."""
        return self.arrays.slots.nbytes


def _release_locks() -> None:
    """Release the locks of all tables: threads that held them do not exist in a forked child."""
    for table in _TABLES:
        table.arrays.lock[:] = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_locks)
