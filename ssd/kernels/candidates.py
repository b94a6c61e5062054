"""What may follow a node of a draft: the tokens that its samples and pointers go on with, and who says so."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ssd.corpus.ring import SEPARATOR
from ssd.kernels.jit import count_bits, equal_words, inline, lowest_bit, outline, peek
from ssd.kernels.odds import GLOBAL, LEVELS, LOCAL, ROWS, SAMPLES, SOURCES
from ssd.sequences.tables import EVIDENCE, MASKS, MISSES

CONSIDERED = 24
"""Tokens that are counted at a node before the best are kept."""
DROPPED_MISSES = 5
"""A pointer is dropped after more misses than this."""
OWN_FIRST = (LOCAL, GLOBAL)
"""Where tokens are equally good, those of the request itself are better: 0.3 %."""
OLDEST = np.int64(1 << 62)


class Counted(NamedTuple):
    """What follows a node. A row is a level of a source's evidence."""

    tokens: np.ndarray
    """uint32 [CONSIDERED]."""
    votes: np.ndarray
    """int64 [CONSIDERED, ROWS]: samples that go on with the token."""
    masks: np.ndarray
    """int32 [CONSIDERED, ROWS]: which samples those are."""
    alive: np.ndarray
    """int64 [ROWS]: samples that agree with the path to the node."""
    newest: np.ndarray
    """uint32 [ROWS]: the token that the newest of them goes on with; the separator if a request ends there."""
    youngest: np.ndarray
    """int64 [ROWS]: its age."""
    said: np.ndarray
    """uint32 [SOURCES]: what the pointers say, the separator for nothing."""
    scores: np.ndarray
    """float64 [CONSIDERED]: scratch of `keep_best`."""
    following: np.ndarray
    """uint32 [SAMPLES]: scratch of `count_continuations`, what each sample of a row goes on with."""


def new_counted() -> Counted:
    """Room for one node."""
    return Counted(
        np.empty(CONSIDERED, np.uint32),
        np.zeros((CONSIDERED, ROWS), np.int64),
        np.zeros((CONSIDERED, ROWS), np.int32),
        np.zeros(ROWS, np.int64),
        np.empty(ROWS, np.uint32),
        np.empty(ROWS, np.int64),
        np.empty(SOURCES, np.uint32),
        np.empty(CONSIDERED, np.float64),
        np.empty(SAMPLES, np.uint32),
    )


@inline
def _kind_of(counted, kinds, token):  # type: ignore[no-untyped-def]
    """Where a token stands among the `kinds` counted; a new one is put behind them, if there is room."""
    for kind in range(kinds):
        if counted.tokens[kind] == token:
            return kind
    if kinds < CONSIDERED:
        counted.tokens[kinds] = token
        for row in range(ROWS):
            counted.votes[kinds, row] = 0
            counted.masks[kinds, row] = 0
    return kinds


@inline
def _ask_pointers(counted, node, depth, pointers):  # type: ignore[no-untyped-def]
    """Note what the pointers say comes at `depth`; returns how many different tokens."""
    kinds = 0
    for source in OWN_FIRST:
        counted.said[source] = SEPARATOR
        if pointers[source] != 0 and node[MISSES + source] <= DROPPED_MISSES:
            token = peek(pointers[source], depth)
            counted.said[source] = token
            if token != SEPARATOR:
                kinds = max(kinds, _kind_of(counted, kinds, token) + 1)
    return kinds


@inline
def _read_on(counted, row, evidence, piece, level, mask, ahead):  # type: ignore[no-untyped-def]
    """Read what each sample in `mask` goes on with, and note the newest of them."""
    youngest, newest = OLDEST, SEPARATOR
    while mask != 0:
        index = lowest_bit(mask)
        mask &= mask - np.uint32(1)
        token = peek(evidence.addresses[piece, level, index], ahead)
        counted.following[index] = token
        if evidence.ages[piece, level, index] < youngest:
            youngest, newest = evidence.ages[piece, level, index], token
    counted.youngest[row], counted.newest[row] = youngest, newest


@inline
def _count_level(counted, kinds, row, evidence, piece, level, mask, ahead):  # type: ignore[no-untyped-def]
    """Count what the samples in `mask` go on with; returns how many different tokens there are now."""
    sampled = evidence.counts[piece, level]
    if sampled < SAMPLES:
        mask &= (np.uint32(1) << np.uint32(sampled)) - np.uint32(1)
    alive, ended = count_bits(mask), 0
    counted.alive[row] = alive
    _read_on(counted, row, evidence, piece, level, mask, ahead)
    while mask != 0:
        token = counted.following[lowest_bit(mask)]
        alike = mask & equal_words(counted.following.ctypes.data, token)
        mask &= ~alike
        votes = count_bits(alike)
        if token == SEPARATOR:
            ended = votes
            continue
        kind = _kind_of(counted, kinds, token)
        if kind < CONSIDERED:
            kinds = max(kinds, kind + 1)
            counted.votes[kind, row], counted.masks[kind, row] = votes, np.int32(alike)
    return kinds, 2 * ended > alive


@outline
def count_continuations(counted, node, depth, evidence, pointers):  # type: ignore[no-untyped-def]
    """Count what follows a node at `depth`. Returns how many different tokens; 0 where requests mostly ended."""
    kinds = _ask_pointers(counted, node, depth, pointers)
    ends = False
    for source in OWN_FIRST:
        piece = node[EVIDENCE + source]
        for level in range(LEVELS):
            row = source * LEVELS + level
            mask, ahead = np.uint32(node[MASKS + row]), depth - evidence.found_at[piece]
            kinds, ended = _count_level(counted, kinds, row, evidence, piece, level, mask, ahead)
            ends = ends or ended
    return 0 if ends else kinds


@inline
def _score(counted, kind):  # type: ignore[no-untyped-def]
    """How promising a token is, roughly: its shares, and the word of a pointer."""
    score = 1.0 if counted.tokens[kind] == counted.said[GLOBAL] or counted.tokens[kind] == counted.said[LOCAL] else 0.0
    for row in range(ROWS):
        score += counted.votes[kind, row] / max(1, counted.alive[row])
    return score


@inline
def _swap(counted, one, other):  # type: ignore[no-untyped-def]
    counted.tokens[one], counted.tokens[other] = counted.tokens[other], counted.tokens[one]
    counted.scores[one], counted.scores[other] = counted.scores[other], counted.scores[one]
    for row in range(ROWS):
        counted.votes[one, row], counted.votes[other, row] = counted.votes[other, row], counted.votes[one, row]
        counted.masks[one, row], counted.masks[other, row] = counted.masks[other, row], counted.masks[one, row]


@outline
def keep_best(counted, kinds, least, most):  # type: ignore[no-untyped-def]
    """Move the `most` most promising tokens with a score of at least `least` to the front; returns how many."""
    kept = 0
    for kind in range(kinds):
        counted.scores[kind] = _score(counted, kind)
        if counted.scores[kind] >= least:
            if kind != kept:
                _swap(counted, kept, kind)
            kept += 1
    if kept <= most:
        return kept
    for place in range(most):
        best = place
        for kind in range(place + 1, kept):
            if counted.scores[kind] > counted.scores[best]:
                best = kind
        if best != place:
            _swap(counted, place, best)
    return most
