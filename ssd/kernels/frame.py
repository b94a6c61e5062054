"""The frame of a step: the addresses of all arrays that it uses, in one array.

Passing forty arrays to a kernel takes longer than drafting, and the kernel counts references whenever it passes one on.
Arrays that it makes from addresses avoid both costs. The owner of a frame keeps its arrays alive; shapes are not
checked.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray

from ssd.budget.padding import MAX_LENGTHS, MAX_SIZES
from ssd.budget.token_budget import TokenBudget
from ssd.kernels.budget import FACTS, MAX_KNOTS, STATE, Budget
from ssd.kernels.candidates import CONSIDERED, Counted, new_counted
from ssd.kernels.estimate import Levels, new_levels
from ssd.kernels.evidence import Evidence, new_evidence
from ssd.kernels.fallback import MAX_FOUND, TOTAL_SLOTS, Fallback, FallbackTable, Found, new_found
from ssd.kernels.grow import Frontier, new_frontier
from ssd.kernels.jit import inline, pointer_to
from ssd.kernels.learned import LearnedTables
from ssd.kernels.match import SPAN_COLUMNS, TIER_COLUMNS
from ssd.kernels.probabilities import (
    CELL_COUNT,
    ESTIMATE_COLUMNS,
    INPUTS,
    LEVELS,
    NOISE_WEIGHTS,
    ROWS,
    SAMPLES,
    SOURCES,
    WEIGHT_SETS,
)
from ssd.sequences.tables import CANDIDATE_COLUMNS, KEPT, NODE_COLUMNS, STATE_COLUMNS, Sequences
from ssd.stats import AGES, POSITIONS, PROB_BINS, SOURCE_COUNT, Counters, Stats

LOCAL_TIERS = 2


class Tables(NamedTuple):
    """The tables of `ssd.sequences.tables`."""

    state: np.ndarray
    nodes: np.ndarray
    probs: np.ndarray
    candidates: np.ndarray
    estimates: np.ndarray


class Model(NamedTuple):
    """The learned tables of `ssd.kernels.probabilities`, and the counted tokens of `ssd.kernels.fallback`."""

    cells: np.ndarray
    logits: np.ndarray
    weights: np.ndarray
    noise_weights: np.ndarray
    fallback: Fallback


class Own(NamedTuple):
    """Scratch arrays of one sequence."""

    tiers: np.ndarray
    """int64 [LOCAL_TIERS, TIER_COLUMNS]: tiers of its own text."""
    spans: np.ndarray
    """int64 [LOCAL_TIERS, SPAN_COLUMNS]."""
    pointers: np.ndarray
    """int64 [SOURCES]: addresses of the pointers' next tokens, 0 for none."""
    on_path: np.ndarray
    """uint8 [nodes]: 1 for accepted nodes."""


ROW_COUNT, WIDTH = range(2)
"""Indices of the number of rows of the tables, and of their width."""
TABLES = 2
"""Index of the first address of a part, as the following ones."""
MODEL = TABLES + len(Tables._fields)
BUDGET = MODEL + len(Model._fields) - 1 + len(Fallback._fields)
COUNTERS = BUDGET + len(Budget._fields)
EVIDENCE_AT = COUNTERS + len(Counters._fields)
COUNTED_AT = EVIDENCE_AT + len(Evidence._fields)
LEVELS_AT = COUNTED_AT + len(Counted._fields)
FRONTIER_AT = LEVELS_AT + len(Levels._fields)
FOUND_AT = FRONTIER_AT + len(Frontier._fields)
OWN_AT = FOUND_AT + len(Found._fields)


class Frame:
    """The addresses for one drafter; a new one is made when its tables grow."""

    def __init__(
        self, sequences: Sequences, learned: LearnedTables, fallback: FallbackTable, budget: TokenBudget, stats: Stats
    ) -> None:
        width = sequences.tables[1].shape[1]
        own = Own(
            np.zeros((LOCAL_TIERS, TIER_COLUMNS), np.int64),
            np.zeros((LOCAL_TIERS, SPAN_COLUMNS), np.int64),
            np.zeros(SOURCES, np.int64),
            np.zeros(width, np.uint8),
        )
        scratch = (new_evidence(SOURCES * width), new_counted(), new_levels(), new_frontier(width), new_found(), own)
        model, counters = (*learned.arrays, *fallback.arrays), tuple(stats.counters)
        self.parts: tuple[tuple[np.ndarray, ...], ...] = (sequences.tables, model, budget.arrays, counters, *scratch)
        """The arrays, by part."""
        addresses = [array.ctypes.data for part in self.parts for array in part]
        self.addresses = np.array([len(sequences.state), width, *addresses], np.int64)
        """int64."""
        self.nbytes = sum(array.nbytes for part in scratch for array in part)
        """Memory of the scratch arrays."""


@inline
def _bytes(address, shape):  # type: ignore[no-untyped-def]
    return carray(pointer_to(address), shape, np.uint8)


@inline
def _ints(address, shape):  # type: ignore[no-untyped-def]
    return carray(pointer_to(address), shape, np.int32)


@inline
def _words(address, shape):  # type: ignore[no-untyped-def]
    return carray(pointer_to(address), shape, np.uint32)


@inline
def shorts(address, shape):  # type: ignore[no-untyped-def]
    """Return the uint16 array at an address."""
    return carray(pointer_to(address), shape, np.uint16)


@inline
def longs(address, shape):  # type: ignore[no-untyped-def]
    """Return the int64 array at an address."""
    return carray(pointer_to(address), shape, np.int64)


@inline
def _floats(address, shape):  # type: ignore[no-untyped-def]
    return carray(pointer_to(address), shape, np.float32)


@inline
def _doubles(address, shape):  # type: ignore[no-untyped-def]
    return carray(pointer_to(address), shape, np.float64)


@inline
def open_tables(frame):  # type: ignore[no-untyped-def]
    """Return the tables of the running sequences."""
    rows, width = frame[ROW_COUNT], frame[WIDTH]
    return Tables(
        longs(frame[TABLES], (rows, STATE_COLUMNS)),
        _ints(frame[TABLES + 1], (rows, width, NODE_COLUMNS)),
        _floats(frame[TABLES + 2], (rows, width, 2)),
        _ints(frame[TABLES + 3], (rows, width, KEPT, CANDIDATE_COLUMNS)),
        _floats(frame[TABLES + 4], (rows, width, KEPT, ESTIMATE_COLUMNS)),
    )


@inline
def open_model(frame):  # type: ignore[no-untyped-def]
    """Return the learned tables and the counted tokens."""
    return Model(
        _floats(frame[MODEL], (CELL_COUNT, 2)),
        _floats(frame[MODEL + 1], (CELL_COUNT,)),
        _floats(frame[MODEL + 2], (WEIGHT_SETS, INPUTS)),
        _floats(frame[MODEL + 3], (NOISE_WEIGHTS,)),
        Fallback(_words(frame[MODEL + 4], (TOTAL_SLOTS, 2)), _words(frame[MODEL + 5], (1,))),
    )


@inline
def open_budget(frame):  # type: ignore[no-untyped-def]
    """Return the arrays of the token budget."""
    return Budget(
        _doubles(frame[BUDGET], (MAX_KNOTS,)),
        _doubles(frame[BUDGET + 1], (MAX_KNOTS,)),
        longs(frame[BUDGET + 2], (MAX_SIZES,)),
        longs(frame[BUDGET + 3], (MAX_LENGTHS,)),
        longs(frame[BUDGET + 4], (FACTS,)),
        _doubles(frame[BUDGET + 5], (STATE,)),
    )


@inline
def open_counters(frame):  # type: ignore[no-untyped-def]
    """Return the counters of the statistics."""
    return Counters(
        longs(frame[COUNTERS], (3,)),
        longs(frame[COUNTERS + 1], (SOURCE_COUNT, 2)),
        longs(frame[COUNTERS + 2], (POSITIONS, 2)),
        longs(frame[COUNTERS + 3], (AGES, 2)),
        _doubles(frame[COUNTERS + 4], (PROB_BINS, 3)),
    )


@inline
def open_evidence(frame):  # type: ignore[no-untyped-def]
    """Return the arrays for the evidence of a draft."""
    searches = SOURCES * frame[WIDTH]
    return Evidence(
        longs(frame[EVIDENCE_AT], (searches,)),
        longs(frame[EVIDENCE_AT + 1], (searches, LEVELS)),
        longs(frame[EVIDENCE_AT + 2], (searches, LEVELS)),
        longs(frame[EVIDENCE_AT + 3], (searches, LEVELS)),
        longs(frame[EVIDENCE_AT + 4], (searches, LEVELS, SAMPLES)),
        longs(frame[EVIDENCE_AT + 5], (searches, LEVELS, SAMPLES)),
        longs(frame[EVIDENCE_AT + 6], (searches,)),
    )


@inline
def open_counted(frame):  # type: ignore[no-untyped-def]
    """Return the arrays for the candidates of a node."""
    return Counted(
        _words(frame[COUNTED_AT], (CONSIDERED,)),
        longs(frame[COUNTED_AT + 1], (CONSIDERED, ROWS)),
        _ints(frame[COUNTED_AT + 2], (CONSIDERED, ROWS)),
        longs(frame[COUNTED_AT + 3], (ROWS,)),
        _words(frame[COUNTED_AT + 4], (ROWS,)),
        longs(frame[COUNTED_AT + 5], (ROWS,)),
        _words(frame[COUNTED_AT + 6], (SOURCES,)),
        _doubles(frame[COUNTED_AT + 7], (CONSIDERED,)),
        _words(frame[COUNTED_AT + 8], (SAMPLES,)),
    )


@inline
def open_levels(frame):  # type: ignore[no-untyped-def]
    """Return the arrays for the summary of a node's evidence."""
    return Levels(
        longs(frame[LEVELS_AT], (ROWS,)),
        longs(frame[LEVELS_AT + 1], (ROWS,)),
        longs(frame[LEVELS_AT + 2], (ROWS,)),
        longs(frame[LEVELS_AT + 3], (SOURCES,)),
        longs(frame[LEVELS_AT + 4], (ROWS,)),
        _floats(frame[LEVELS_AT + 5], (ROWS,)),
    )


@inline
def open_frontier(frame):  # type: ignore[no-untyped-def]
    """Return the arrays for the candidates that may be added to a draft."""
    width = frame[WIDTH]
    return Frontier(
        longs(frame[FRONTIER_AT], (width,)),
        longs(frame[FRONTIER_AT + 1], (width,)),
        _words(frame[FRONTIER_AT + 2], (width,)),
        _floats(frame[FRONTIER_AT + 3], (width, 2)),
    )


@inline
def open_found(frame):  # type: ignore[no-untyped-def]
    """Return the arrays for the fallback candidates of a node."""
    return Found(_words(frame[FOUND_AT], (MAX_FOUND,)), _floats(frame[FOUND_AT + 1], (MAX_FOUND,)))


@inline
def open_own(frame):  # type: ignore[no-untyped-def]
    """Return the scratch arrays of one sequence."""
    return Own(
        longs(frame[OWN_AT], (LOCAL_TIERS, TIER_COLUMNS)),
        longs(frame[OWN_AT + 1], (LOCAL_TIERS, SPAN_COLUMNS)),
        longs(frame[OWN_AT + 2], (SOURCES,)),
        _bytes(frame[OWN_AT + 3], (frame[WIDTH],)),
    )
