"""Odds of acceptance, learned online from what the target produced.

A candidate's evidence becomes inputs, each the logit of a probability: cells of tables that are looked up by match
length, count, share and recency, a blend of a source's levels (prediction by partial matching), and cells for
pointers, for the token itself and for the token after the one before it. A logistic mixture weighs them, with one set
of weights for each pair of match lengths (Mahoney, "Adaptive weighing of context models for lossless data
compression", 2005), and a last table corrects what such mixtures came to. After a step every candidate
that was considered on the accepted path is a lesson.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types

from ssd.kernels.jit import FloatRows, FloatsOut, inline, kernel

SOURCES, LEVELS = 2, 2
ROWS = SOURCES * LEVELS
SAMPLES = 32
"""Occurrences that stand for all of a match, a bit of a mask each; more were worth less than 0.5 %."""
GLOBAL, LOCAL = 0, 1
"""As in `ssd.types.Source`."""

LENGTH_BUCKETS, COUNT_BUCKETS, SHARE_BUCKETS = 10, 8, 13
RUN_BUCKETS, MISS_BUCKETS = 11, 4
TOKEN_BITS, PAIR_BITS, TOKEN_SHARES = 14, 14, 4
"""Tokens, and pairs of them, share cells by a hash of so many bits."""
FINAL_BUCKETS, FINAL_DEPTHS, FINAL_SOURCES = 33, 4, 4

# Where each table begins among the cells.
MATCH_CELLS = 0
POINTER_CELLS = MATCH_CELLS + SOURCES * LEVELS * LENGTH_BUCKETS * COUNT_BUCKETS * SHARE_BUCKETS * 2
TOKEN_CELLS = POINTER_CELLS + SOURCES * RUN_BUCKETS * MISS_BUCKETS * 2
PAIR_CELLS = TOKEN_CELLS + (TOKEN_SHARES << TOKEN_BITS)
FINAL_CELLS = PAIR_CELLS + (TOKEN_SHARES << PAIR_BITS)
CELL_COUNT = FINAL_CELLS + FINAL_DEPTHS * FINAL_SOURCES * FINAL_BUCKETS

# Inputs of a mixture: cells of matches, pointers, the token and the pair of tokens, then the two blends.
TABLE_INPUTS = ROWS + SOURCES + 2
INPUTS = TABLE_INPUTS + SOURCES
TOKEN_INPUT = TABLE_INPUTS - 2
PAIR_INPUT = TABLE_INPUTS - 1
BLEND_INPUT = TABLE_INPUTS

INPUT_CELLS = TABLE_INPUTS + 1
"""One more for the final correction."""
NO_CELL = -1

# Columns of what is kept of a candidate's odds, float32: the mixture's, the blends' logits, and the final one.
MIXED, BLENDS, FINAL = 0, 1, 1 + SOURCES
CHANCE_COLUMNS = FINAL + 1

SET_LENGTHS = 5
WEIGHT_SETS = SET_LENGTHS * SET_LENGTHS

# Columns of cells; their logits, which drafts read, lie apart so that more of them fit into a CPU's cache.
CHANCE, SEEN = range(2)

SEEN_CAP, TOKEN_SEEN_CAP, FINAL_SEEN_CAP = 250.0, 60.0, 500.0
"""A cell follows at least the last so many lessons; both found on recorded traffic, as everything here."""
LEARNING_RATE = 0.005
START_WEIGHTS = (0.2,) * (SOURCES * LEVELS) + (0.1,) * 4 + (0.4,) * SOURCES
START_SEEN = 0.5
FINAL_START = 40.0

# Prices: the running means behind them, and how fast they follow.
PRICE_RATE = 0.001
START_TOKENS_PER_COST = 1.5

_LENGTH_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24)
_COUNT_EDGES = (1, 2, 3, 4, 8, 16, 64)
_RUN_EDGES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
_SET_EDGES = (0, 2, 5, 11)
_TABLE = 65


def _buckets(edges: tuple[int, ...]) -> np.ndarray:
    """The bucket of 0 to 64: the first whose edge is not below the number."""
    return np.searchsorted(np.array(edges), np.arange(_TABLE)).astype(np.int32)


LENGTH_BUCKET = _buckets(_LENGTH_EDGES)
COUNT_BUCKET = _buckets(_COUNT_EDGES)
RUN_BUCKET = _buckets(_RUN_EDGES)
SET_BUCKET = _buckets(_SET_EDGES)


@inline
def bucket(table, number):  # type: ignore[no-untyped-def]
    """The bucket of a number that is not negative."""
    return table[min(number, 64)]


def _share_buckets() -> np.ndarray:
    """Of `votes` among `alive` samples, in row and column: 0 for none, 12 for all, the rest evenly between."""
    votes, alive = np.ogrid[: SAMPLES + 1, : SAMPLES + 1]
    share = votes * (np.float32(1.0) / np.maximum(alive, 1).astype(np.float32)).astype(np.float64)
    middle = 1 + np.minimum(SHARE_BUCKETS - 3, (share * (SHARE_BUCKETS - 2)).astype(np.int32))
    return np.where(votes == 0, 0, np.where(share >= 1.0, SHARE_BUCKETS - 1, middle)).astype(np.int8)


SHARE_BUCKET = _share_buckets()


# Tables in place of exponentials: a draft computes hundreds.
_VALUE_RANGE, _VALUE_STEPS = 8.0, 128
_VALUES = (np.arange(2 * int(_VALUE_RANGE) * _VALUE_STEPS) + 0.5) / _VALUE_STEPS - _VALUE_RANGE
_CHANCES = (1.0 / (1.0 + np.exp(-_VALUES))).astype(np.float32)
_CHANCE_STEPS = 4096
_LOGITS = (np.arange(_CHANCE_STEPS) + 0.5) / _CHANCE_STEPS
_LOGITS = np.clip(np.log(_LOGITS / (1.0 - _LOGITS)), -6.9, 6.9).astype(np.float32)


@inline
def quick_chance(value):  # type: ignore[no-untyped-def]
    """The inverse of `logit` from a table, within 0.002."""
    at = int((value + np.float32(_VALUE_RANGE)) * np.float32(_VALUE_STEPS))
    return _CHANCES[min(max(at, 0), len(_CHANCES) - 1)]


@inline
def quick_logit(chance):  # type: ignore[no-untyped-def]
    """`logit` from a table of 4096 chances."""
    return _LOGITS[min(int(chance * np.float32(_CHANCE_STEPS)), _CHANCE_STEPS - 1)]


@inline
def logit(chance):  # type: ignore[no-untyped-def]
    """ln(p / (1 - p)), bounded."""
    if chance <= 0.001:
        return -6.9
    if chance >= 0.999:
        return 6.9
    return math.log(chance / (1.0 - chance))


@inline
def chance_of(value):  # type: ignore[no-untyped-def]
    """The inverse of `logit`."""
    return 1.0 / (1.0 + math.exp(-value))


@inline
def match_cells(row, length, count):  # type: ignore[no-untyped-def]
    """The first of the cells of a level of a source, row = source * LEVELS + level, for a length and count."""
    cell = row * LENGTH_BUCKETS + bucket(LENGTH_BUCKET, length)
    return MATCH_CELLS + (cell * COUNT_BUCKETS + bucket(COUNT_BUCKET, count)) * SHARE_BUCKETS * 2


@inline
def match_cell(cells, votes, alive, is_newest):  # type: ignore[no-untyped-def]
    """Of such cells, the one for `votes` of `alive` samples."""
    return cells + SHARE_BUCKET[votes, alive] * 2 + is_newest


@inline
def pointer_cell(source, run, misses, agrees):  # type: ignore[no-untyped-def]
    """The cell of what a pointer says."""
    cell = (source * RUN_BUCKETS + bucket(RUN_BUCKET, run)) * MISS_BUCKETS + min(misses, MISS_BUCKETS - 1)
    return POINTER_CELLS + cell * 2 + agrees


@inline
def token_share(chance):  # type: ignore[no-untyped-def]
    """Even parts of the chances."""
    return min(TOKEN_SHARES - 1, int(chance * TOKEN_SHARES))


@inline
def token_cells(token):  # type: ignore[no-untyped-def]
    """The first of a token's cells: the one for the least chance."""
    hashed = ((np.uint64(token) * np.uint64(2654435761)) & np.uint64(0xFFFFFFFF)) >> np.uint64(32 - TOKEN_BITS)
    return TOKEN_CELLS + np.int64(hashed) * TOKEN_SHARES


@inline
def pair_cells(before, token):  # type: ignore[no-untyped-def]
    """The first of the cells of a token behind the token `before`."""
    hashed = (
        (np.uint64(token) * np.uint64(2654435761) + np.uint64(before) * np.uint64(0x9E3779B1CD))
        * np.uint64(0x9E3779B97F4A7C15)
    ) >> np.uint64(64 - PAIR_BITS)
    return PAIR_CELLS + np.int64(hashed) * TOKEN_SHARES


@inline
def final_cell(depth, matched, value):  # type: ignore[no-untyped-def]
    """The lower of the two cells between which a mixture's value is corrected, and how far it is to the upper one."""
    at = (min(max(value, -7.9), 7.9) + 8.0) * 2.0
    low = int(at)
    return FINAL_CELLS + (min(depth, FINAL_DEPTHS - 1) * 4 + matched) * FINAL_BUCKETS + low, at - low


@inline
def learn_cell(cells, logits, cell, happened, cap):  # type: ignore[no-untyped-def]
    """Move a cell towards what happened, by less the more it has seen."""
    seen = cells[cell, SEEN] + 1.0
    chance = cells[cell, CHANCE] + (happened - cells[cell, CHANCE]) / seen
    cells[cell, CHANCE] = chance
    logits[cell] = logit(chance)
    cells[cell, SEEN] = min(seen, cap)


_COUNT_OF = (1.0, 2.0, 3.0, 4.0, 6.0, 12.0, 24.0, 64.0)
"""A typical count of each bucket."""


@inline
def _part_of(share):  # type: ignore[no-untyped-def]
    """A typical share of its bucket."""
    return 0.0 if share == 0 else 1.0 if share == SHARE_BUCKETS - 1 else (share - 0.5) / 11.0


@inline
def _match_prior(index):  # type: ignore[no-untyped-def]
    """What a match cell begins with: its share, drawn towards 0.02 / 0.54 by half an occurrence."""
    share, count = (index // 2) % SHARE_BUCKETS, (index // 2 // SHARE_BUCKETS) % COUNT_BUCKETS
    return (_part_of(share) * _COUNT_OF[count] + 0.02) / (_COUNT_OF[count] + 0.54)


@inline
def _pointer_prior(index):  # type: ignore[no-untyped-def]
    """What a pointer's cell begins with: the longer it was right, the more it will be."""
    run = (index // 2 // MISS_BUCKETS) % RUN_BUCKETS
    right = (run + 0.5) / (run + 1.5)
    return right if index % 2 == 1 else 1.0 - right


@kernel(FloatRows, FloatsOut, returns=types.void)
def fill_prior(cells, logits):  # type: ignore[no-untyped-def]
    """Write what all cells begin with, float32 [CELL_COUNT, 2], and their logits, float32 [CELL_COUNT]."""
    for index in range(CELL_COUNT):
        if index < POINTER_CELLS:
            chance = _match_prior(index)
        elif index < TOKEN_CELLS:
            chance = _pointer_prior(index - POINTER_CELLS)
        elif index < FINAL_CELLS:
            chance = ((index - TOKEN_CELLS) % TOKEN_SHARES + 0.5) / TOKEN_SHARES
        else:
            chance = chance_of((index - FINAL_CELLS) % FINAL_BUCKETS / 2.0 - 8.0)
        cells[index, CHANCE] = chance
        logits[index] = logit(chance)
        cells[index, SEEN] = START_SEEN if index < FINAL_CELLS else FINAL_START


class Odds:
    """The learned tables of one namespace."""

    def __init__(self) -> None:
        self.cells = np.zeros((CELL_COUNT, 2), np.float32)
        self.logits = np.zeros(CELL_COUNT, np.float32)
        fill_prior(self.cells, self.logits)
        self.weights = np.tile(np.array(START_WEIGHTS, np.float32), (WEIGHT_SETS, 1))
        self.pace = np.array([START_TOKENS_PER_COST, 1.0])
        """Running means of tokens a step, and of what a step costs; float64 [2]."""

        self.arrays = (self.cells, self.logits, self.weights, self.pace)
        """As kernels take them."""

    @property
    def nbytes(self) -> int:
        """Memory of all tables."""
        return sum(array.nbytes for array in self.arrays)
