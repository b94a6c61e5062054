"""Candidates of a draft node: the tokens that follow its samples and pointers, with their counts."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np

from ssd.corpus.ring import SEPARATOR
from ssd.kernels.jit import count_bits, equal_words, inline, lowest_bit, outline, peek
from ssd.kernels.probabilities import GLOBAL, LEVELS, LOCAL, ROWS, SAMPLES, SOURCES
from ssd.sequences.tables import EVIDENCE, MASKS, MISSES

CONSIDERED = 24
"""Maximum number of different tokens that are counted at a node; the best are kept."""
DROPPED_MISSES = 5
"""A pointer is dropped after more misses than this."""
OWN_FIRST = (LOCAL, GLOBAL)
"""Order of the sources: among equally good tokens, those of the request's own text come first, which gains 0.3 %."""
OLDEST = np.int64(1 << 62)


class CountedTokens(NamedTuple):
    """Counts of the tokens that follow a node. A row is a level of a source's evidence."""

    tokens: Annotated[np.ndarray, np.uint32, CONSIDERED]
    samples: Annotated[np.ndarray, np.int64, CONSIDERED, ROWS]
    """Number of samples that the token follows."""
    masks: Annotated[np.ndarray, np.int32, CONSIDERED, ROWS]
    """Mask of these samples."""
    agreeing: Annotated[np.ndarray, np.int64, ROWS]
    """Number of samples that agree with the path to the node."""
    newest: Annotated[np.ndarray, np.uint32, ROWS]
    """The token that follows the newest of these samples; the separator if a request ends there."""
    newest_ages: Annotated[np.ndarray, np.int64, ROWS]
    predicted: Annotated[np.ndarray, np.uint32, SOURCES]
    """The tokens that the pointers predict; the separator for none."""
    scores: Annotated[np.ndarray, np.float64, CONSIDERED]
    """Scratch of `keep_best`."""
    following: Annotated[np.ndarray, np.uint32, SAMPLES]
    """Scratch of `count_continuations`: the token that follows each sample of a row."""


@inline
def _index_of(counted, count, token):  # type: ignore[no-untyped-def]
    """Return the index of a token among the `count` counted ones; a new one is appended if there is room."""
    for index in range(count):
        if counted.tokens[index] == token:
            return index
    if count < CONSIDERED:
        counted.tokens[count] = token
        for row in range(ROWS):
            counted.samples[count, row] = 0
            counted.masks[count, row] = 0
    return count


@inline
def _read_pointers(counted, node, depth, pointers):  # type: ignore[no-untyped-def]
    """Record the tokens that the pointers predict at `depth`; return the number of different ones."""
    count = 0
    for source in OWN_FIRST:
        counted.predicted[source] = SEPARATOR
        if pointers[source] != 0 and node[MISSES + source] <= DROPPED_MISSES:
            token = peek(pointers[source], depth)
            counted.predicted[source] = token
            if token != SEPARATOR:
                count = max(count, _index_of(counted, count, token) + 1)
    return count


@inline
def _read_next_tokens(counted, row, evidence, search, level, mask, ahead):  # type: ignore[no-untyped-def]
    """Read the token that follows each sample in `mask`, and record the newest sample."""
    newest_age, newest = OLDEST, SEPARATOR
    while mask != 0:
        index = lowest_bit(mask)
        mask &= mask - np.uint32(1)
        token = peek(evidence.addresses[search, level, index], ahead)
        counted.following[index] = token
        if evidence.ages[search, level, index] < newest_age:
            newest_age, newest = evidence.ages[search, level, index], token
    counted.newest_ages[row], counted.newest[row] = newest_age, newest


@inline
def _count_level(counted, count, row, evidence, search, level, mask, ahead):  # type: ignore[no-untyped-def]
    """Count the tokens that follow the samples in `mask`.

    Returns the number of different tokens so far, and whether most samples are at the end of their request.
    """
    sampled = evidence.counts[search, level]
    if sampled < SAMPLES:
        mask &= (np.uint32(1) << np.uint32(sampled)) - np.uint32(1)
    agreeing, ended = count_bits(mask), 0
    counted.agreeing[row] = agreeing
    _read_next_tokens(counted, row, evidence, search, level, mask, ahead)
    while mask != 0:
        token = counted.following[lowest_bit(mask)]
        alike = mask & equal_words(counted.following.ctypes.data, token)
        mask &= ~alike
        samples = count_bits(alike)
        if token == SEPARATOR:
            ended = samples
            continue
        index = _index_of(counted, count, token)
        if index < CONSIDERED:
            count = max(count, index + 1)
            counted.samples[index, row], counted.masks[index, row] = samples, np.int32(alike)
    return count, 2 * ended > agreeing


@outline
def count_continuations(counted, node, depth, evidence, pointers):  # type: ignore[no-untyped-def]
    """Count the tokens that follow a node at `depth`.

    Returns the number of different ones, and whether most requests end there, which makes it 0.
    """
    count = _read_pointers(counted, node, depth, pointers)
    ends = False
    for source in OWN_FIRST:
        search = node[EVIDENCE + source]
        for level in range(LEVELS):
            row = source * LEVELS + level
            mask, ahead = np.uint32(node[MASKS + row]), depth - evidence.found_at[search]
            count, ended = _count_level(counted, count, row, evidence, search, level, mask, ahead)
            ends = ends or ended
    return (0 if ends else count), ends


@inline
def _score(counted, index):  # type: ignore[no-untyped-def]
    """Return a rough score of a token: the sum of its shares, plus 1 if a pointer predicts it."""
    score = (
        1.0
        if counted.tokens[index] == counted.predicted[GLOBAL] or counted.tokens[index] == counted.predicted[LOCAL]
        else 0.0
    )
    for row in range(ROWS):
        score += counted.samples[index, row] / max(1, counted.agreeing[row])
    return score


@inline
def _swap(counted, one, other):  # type: ignore[no-untyped-def]
    counted.tokens[one], counted.tokens[other] = counted.tokens[other], counted.tokens[one]
    counted.scores[one], counted.scores[other] = counted.scores[other], counted.scores[one]
    for row in range(ROWS):
        counted.samples[one, row], counted.samples[other, row] = counted.samples[other, row], counted.samples[one, row]
        counted.masks[one, row], counted.masks[other, row] = counted.masks[other, row], counted.masks[one, row]


@outline
def keep_best(counted, count, least, most):  # type: ignore[no-untyped-def]
    """Move the `most` tokens with the highest scores of at least `least` to the front; return their number."""
    kept = 0
    for index in range(count):
        counted.scores[index] = _score(counted, index)
        if counted.scores[index] >= least:
            if index != kept:
                _swap(counted, kept, index)
            kept += 1
    if kept <= most:
        return kept
    for place in range(most):
        best = place
        for index in range(place + 1, kept):
            if counted.scores[index] > counted.scores[best]:
                best = index
        if best != place:
            _swap(counted, place, best)
    return most
