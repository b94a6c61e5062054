"""Tables and weights from which probabilities of acceptance are computed and learned online (`estimate.py`).

A candidate's evidence becomes inputs, each the logit of a probability: cells of tables that are looked up by match
length, count, share and recency, a blend of a source's levels (prediction by partial matching), and cells for
pointers, for the token itself and for the pair of it and the previous token. A logistic mixture weights them, with one
set of weights for each pair of match lengths (Mahoney, "Adaptive weighing of context models for lossless data
compression", 2005), and a last table corrects the mixture's result. After a step every candidate that was considered on
the accepted path is a training example.
"""

from __future__ import annotations

import numpy as np

from ssd.kernels.jit import inline

SOURCES, LEVELS = 2, 2
ROWS = SOURCES * LEVELS
SAMPLES = 32
"""Maximum number of sampled occurrences of a match, one bit of a mask each; more gained less than 0.5 %."""
GLOBAL, LOCAL = 0, 1
"""Indices of the sources, as in `ssd.types.Source`."""
OF_SHORTER, OF_GROUP, OF_LIBRARIES = range(3)
"""Kinds of the second level of the corpus: a shorter match, the longest match within a group, or in the libraries."""

LENGTH_BUCKETS, COUNT_BUCKETS, SHARE_BUCKETS = 10, 8, 13
RUN_BUCKETS, MISS_BUCKETS = 11, 4
TOKEN_BITS, PAIR_BITS, TOKEN_SHARES = 14, 14, 4
"""Number of bits of the hashes of tokens and token pairs; tokens with equal hashes share cells."""
FINAL_BUCKETS, FINAL_DEPTHS, FINAL_SOURCES = 33, 4, 4
FALLBACK_CONTEXTS, FALLBACK_RANKS, FALLBACK_COUNTS, FALLBACK_SHARES = 3, 8, 4, 4

# First cell of each table.
MATCH_CELLS = 0
POINTER_CELLS = MATCH_CELLS + SOURCES * LEVELS * LENGTH_BUCKETS * COUNT_BUCKETS * SHARE_BUCKETS * 2
TOKEN_CELLS = POINTER_CELLS + SOURCES * RUN_BUCKETS * MISS_BUCKETS * 2
PAIR_CELLS = TOKEN_CELLS + (TOKEN_SHARES << TOKEN_BITS)
FINAL_CELLS = PAIR_CELLS + (TOKEN_SHARES << PAIR_BITS)
FALLBACK_CELLS = FINAL_CELLS + FINAL_DEPTHS * FINAL_SOURCES * FINAL_BUCKETS
SECOND_CELLS = FALLBACK_CELLS + FALLBACK_CONTEXTS * FALLBACK_RANKS * FALLBACK_COUNTS * FALLBACK_SHARES
CELL_COUNT = SECOND_CELLS + 2 * LENGTH_BUCKETS * COUNT_BUCKETS * SHARE_BUCKETS * 2

# Inputs of a mixture: cells of matches, pointers, the token and the pair of tokens, then the two blends.
TABLE_INPUTS = ROWS + SOURCES + 2
INPUTS = TABLE_INPUTS + SOURCES
TOKEN_INPUT = TABLE_INPUTS - 2
PAIR_INPUT = TABLE_INPUTS - 1
BLEND_INPUT = TABLE_INPUTS

INPUT_CELLS = TABLE_INPUTS + 1
"""Number of cells per candidate; the last one is for the final correction."""
NO_CELL = -1

# Columns of a candidate's estimates, float32: probability of the mixture, logits of the blends, final probability, and
# what it is computed from where the target's noise is known (`ssd.kernels.noise`).
MIXED, BLENDS, FINAL = 0, 1, 1 + SOURCES
LOG_PROB, NOISE = FINAL + 1, FINAL + 2
ESTIMATE_COLUMNS = FINAL + 3

SET_LENGTHS = 5
SETS = SET_LENGTHS * SET_LENGTHS
WEIGHT_SETS = 3 * SETS
"""One part for each kind of the corpus's second level."""
OF_LOG, OF_NOISE, OF_LEFT, OF_NONE = range(4)
"""Weights of `ssd.kernels.noise`."""
NOISE_WEIGHTS = 4

# Columns of cells: mean of the outcomes, and their number. Drafts read the means' logits, which are a separate array,
# so that more of them fit into the cache.
MEAN, SEEN = range(2)

SEEN_CAP, TOKEN_SEEN_CAP, FINAL_SEEN_CAP = 250.0, 60.0, 500.0
"""Limits of the number of outcomes that a cell averages over; found on recorded traffic, like all constants here."""
LEARNING_RATE = 0.0025
START_WEIGHTS = (0.2,) * (SOURCES * LEVELS) + (0.1,) * 4 + (0.4,) * SOURCES
START_NOISE_WEIGHTS = (1.2, 0.5, 0.5, -0.5)
START_SEEN = 0.5
FINAL_START_SEEN = 40.0
FALLBACK_PRIOR, FALLBACK_START_SEEN = 0.01, 2.0

_LENGTH_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24)
_COUNT_EDGES = (1, 2, 3, 4, 8, 16, 64)
_RUN_EDGES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
_SET_EDGES = (0, 2, 5, 11)
_TABLE = 65


def _buckets(edges: tuple[int, ...]) -> np.ndarray:
    """Return the buckets of 0 to 64: the first whose edge is not below the number."""
    return np.searchsorted(np.array(edges), np.arange(_TABLE)).astype(np.int32)


LENGTH_BUCKET = _buckets(_LENGTH_EDGES)
COUNT_BUCKET = _buckets(_COUNT_EDGES)
RUN_BUCKET = _buckets(_RUN_EDGES)
SET_BUCKET = _buckets(_SET_EDGES)


@inline
def bucket(table, number):  # type: ignore[no-untyped-def]
    """Return the bucket of a non-negative number."""
    return table[min(number, 64)]


def _share_buckets() -> np.ndarray:
    """Return the bucket of `samples` (row) among `agreeing` ones (column): 0 for none, 12 for all, others between."""
    samples, agreeing = np.ogrid[: SAMPLES + 1, : SAMPLES + 1]
    share = samples * (np.float32(1.0) / np.maximum(agreeing, 1).astype(np.float32)).astype(np.float64)
    middle = 1 + np.minimum(SHARE_BUCKETS - 3, (share * (SHARE_BUCKETS - 2)).astype(np.int32))
    return np.where(samples == 0, 0, np.where(share >= 1.0, SHARE_BUCKETS - 1, middle)).astype(np.int8)


SHARE_BUCKET = _share_buckets()


# Tables replace exponentials, which a draft would compute hundreds of times.
_VALUE_RANGE, _VALUE_STEPS = 8.0, 128
_VALUES = (np.arange(2 * int(_VALUE_RANGE) * _VALUE_STEPS) + 0.5) / _VALUE_STEPS - _VALUE_RANGE
_SIGMOIDS = (1.0 / (1.0 + np.exp(-_VALUES))).astype(np.float32)
_PROB_STEPS = 4096
_LOGITS = (np.arange(_PROB_STEPS) + 0.5) / _PROB_STEPS
_LOGITS = np.clip(np.log(_LOGITS / (1.0 - _LOGITS)), -6.9, 6.9).astype(np.float32)


@inline
def fast_sigmoid(value):  # type: ignore[no-untyped-def]
    """Return the logistic function of a value from a table, within 0.002."""
    at = int((value + np.float32(_VALUE_RANGE)) * np.float32(_VALUE_STEPS))
    return _SIGMOIDS[min(max(at, 0), len(_SIGMOIDS) - 1)]


@inline
def fast_logit(prob):  # type: ignore[no-untyped-def]
    """Return the logit of a probability, ln(p / (1 - p)), from a table of 4096 probabilities."""
    return _LOGITS[min(int(prob * np.float32(_PROB_STEPS)), _PROB_STEPS - 1)]


@inline
def interpolated_logit(prob):  # type: ignore[no-untyped-def]
    """Return the logit interpolated from the table: within 0.002, or 0.06 near its bounds."""
    at = prob * np.float32(_PROB_STEPS) - np.float32(0.5)
    low = min(max(int(at), 0), _PROB_STEPS - 2)
    return _LOGITS[low] + (at - np.float32(low)) * (_LOGITS[low + 1] - _LOGITS[low])


@inline
def match_cells(row, length, count):  # type: ignore[no-untyped-def]
    """Return the first cell for a length and count; row = source * LEVELS + level."""
    cell = row * LENGTH_BUCKETS + bucket(LENGTH_BUCKET, length)
    return MATCH_CELLS + (cell * COUNT_BUCKETS + bucket(COUNT_BUCKET, count)) * SHARE_BUCKETS * 2


@inline
def second_cells(second, length, count):  # type: ignore[no-untyped-def]
    """Return the first cell for a length and count of the second level; second: OF_GROUP or OF_LIBRARIES."""
    cell = (second - OF_GROUP) * LENGTH_BUCKETS + bucket(LENGTH_BUCKET, length)
    return SECOND_CELLS + (cell * COUNT_BUCKETS + bucket(COUNT_BUCKET, count)) * SHARE_BUCKETS * 2


@inline
def match_cell(cells, samples, agreeing, is_newest):  # type: ignore[no-untyped-def]
    """Return the cell for `samples` of `agreeing` samples, given the first of its cells."""
    return cells + SHARE_BUCKET[samples, agreeing] * 2 + is_newest


@inline
def pointer_cell(source, run, misses, agrees):  # type: ignore[no-untyped-def]
    """Return the cell of a pointer's prediction."""
    cell = (source * RUN_BUCKETS + bucket(RUN_BUCKET, run)) * MISS_BUCKETS + min(misses, MISS_BUCKETS - 1)
    return POINTER_CELLS + cell * 2 + agrees


@inline
def token_share(prob):  # type: ignore[no-untyped-def]
    """Return the bucket of a probability; buckets are of equal width."""
    return min(TOKEN_SHARES - 1, int(prob * TOKEN_SHARES))


@inline
def token_cells(token):  # type: ignore[no-untyped-def]
    """Return the first of a token's cells, which is for the lowest probability."""
    hashed = ((np.uint64(token) * np.uint64(2654435761)) & np.uint64(0xFFFFFFFF)) >> np.uint64(32 - TOKEN_BITS)
    return TOKEN_CELLS + np.int64(hashed) * TOKEN_SHARES


@inline
def pair_cells(before, token):  # type: ignore[no-untyped-def]
    """Return the first of the cells of a token that follows the token `before`."""
    hashed = (
        (np.uint64(token) * np.uint64(2654435761) + np.uint64(before) * np.uint64(0x9E3779B1CD))
        * np.uint64(0x9E3779B97F4A7C15)
    ) >> np.uint64(64 - PAIR_BITS)
    return PAIR_CELLS + np.int64(hashed) * TOKEN_SHARES


@inline
def final_cell(depth, matched, value):  # type: ignore[no-untyped-def]
    """Return the lower of two cells between which a mixture's value is interpolated, and the upper one's weight."""
    at = (min(max(value, -7.9), 7.9) + 8.0) * 2.0
    low = int(at)
    return FINAL_CELLS + (min(depth, FINAL_DEPTHS - 1) * 4 + matched) * FINAL_BUCKETS + low, at - low


@inline
def fallback_cell(context, rank, count, total):  # type: ignore[no-untyped-def]
    """Return the cell of a fallback candidate: the rank-th of its context, with `count` of the `total` counts there."""
    counts = 0 if count == 1 else 1 if count < 4 else 2 if count < 8 else 3
    # The number of quarters, without a division.
    share = (1 if 4 * count >= total else 0) + (1 if 2 * count >= total else 0) + (1 if 4 * count >= 3 * total else 0)
    return FALLBACK_CELLS + ((context * FALLBACK_RANKS + rank) * FALLBACK_COUNTS + counts) * FALLBACK_SHARES + share


@inline
def learn_cell(cells, logits, cell, outcome, cap):  # type: ignore[no-untyped-def]
    """Update a cell's running mean with an outcome; `cap` bounds the number of outcomes that it averages over."""
    seen = cells[cell, SEEN] + 1.0
    mean = cells[cell, MEAN] + (outcome - cells[cell, MEAN]) / seen
    cells[cell, MEAN] = mean
    logits[cell] = interpolated_logit(np.float32(mean))
    cells[cell, SEEN] = min(seen, cap)
