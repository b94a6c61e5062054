"""Estimate the probabilities of a node's candidates from their evidence and the learned tables."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ssd.corpus.ring import SEPARATOR
from ssd.kernels.jit import bit_length, inline, outline, prefetch
from ssd.kernels.probabilities import (
    BLEND_INPUT,
    BLENDS,
    FINAL,
    GLOBAL,
    LEVELS,
    LOCAL,
    MIXED,
    NO_CELL,
    PAIR_INPUT,
    ROWS,
    SET_BUCKET,
    SET_LENGTHS,
    SOURCES,
    TABLE_INPUTS,
    TOKEN_INPUT,
    bucket,
    final_cell,
    match_cell,
    match_cells,
    pair_cells,
    pointer_cell,
    quick_chance,
    quick_logit,
    token_cells,
    token_share,
)
from ssd.sequences.tables import (
    CANDIDATE_MASKS,
    CELLS,
    EVIDENCE,
    FOUND_AGE,
    FOUND_IN,
    FOUND_LENGTH,
    MISSES,
    RUNS,
    WEIGHT_SET,
)

BLEND_PRIOR = np.float32(0.02)
"""Probability of a token that no level has seen."""


class Levels(NamedTuple):
    """Summary of a node's evidence, one row per level of a source."""

    totals: np.ndarray
    """int64 [ROWS]: occurrences that agree with the path, estimated from the samples; 0 for a row that is not used."""
    lengths: np.ndarray
    """int64 [ROWS]: tokens that they have in common with the context and the path."""
    kinds: np.ndarray
    """int64 [ROWS]: number of different tokens that follow them."""
    longest: np.ndarray
    """int64 [SOURCES]: length of the longest match of a source, 0 for none."""
    cells: np.ndarray
    """int64 [ROWS]: first cell for their length and count."""
    per_sample: np.ndarray
    """float32 [ROWS]: 1 / (samples that agree with the path + kinds)."""


def new_levels() -> Levels:
    """Allocate the arrays for one node."""
    totals, lengths, kinds, cells = (np.zeros(ROWS, np.int64) for _ in range(4))
    return Levels(totals, lengths, kinds, np.zeros(SOURCES, np.int64), cells, np.zeros(ROWS, np.float32))


@inline
def summarize_levels(levels, node, depth, evidence, counted, kinds):  # type: ignore[no-untyped-def]
    """Compute the summary; rows that add no occurrences to those of longer matches are not used."""
    for source in range(SOURCES):
        piece, before = node[EVIDENCE + source], 0
        levels.longest[source] = 0
        for level in range(LEVELS):
            row = source * LEVELS + level
            sampled = evidence.counts[piece, level]
            if counted.alive[row] == 0:
                levels.totals[row] = 0
                continue
            total = counted.alive[row]
            if evidence.totals[piece, level] > sampled:
                total = total * evidence.totals[piece, level] // sampled
            # Occurrences of a longer match are not counted again.
            if total <= before:
                levels.totals[row] = 0
                continue
            before = total
            levels.totals[row] = total
            levels.lengths[row] = evidence.lengths[piece, level] + depth - evidence.found_at[piece]
            if levels.longest[source] == 0:
                levels.longest[source] = levels.lengths[row]
            different = 0
            for kind in range(kinds):
                different += 1 if counted.votes[kind, row] > 0 else 0
            levels.kinds[row] = max(1, different)
            levels.cells[row] = match_cells(row, levels.lengths[row], total)
            levels.per_sample[row] = np.float32(1.0) / np.float32(counted.alive[row] + levels.kinds[row])


@inline
def _blend(kind, source, counted, levels):  # type: ignore[no-untyped-def]
    """Return a source's probability of a token: longer matches correct shorter ones (PPM, Cleary and Witten 1984)."""
    chance = BLEND_PRIOR
    for level in range(LEVELS - 1, -1, -1):
        row = source * LEVELS + level
        if levels.totals[row] > 0:
            chance = (counted.votes[kind, row] + levels.kinds[row] * chance) * levels.per_sample[row]
    return chance


@inline
def fetch_cells(counted, kinds, before, logits):  # type: ignore[no-untyped-def]
    """Prefetch the cells of tokens and pairs, whose tables are too large for the cache."""
    start = logits.ctypes.data
    for kind in range(kinds):
        prefetch(start + 4 * token_cells(counted.tokens[kind]))
        prefetch(start + 4 * pair_cells(before, counted.tokens[kind]))


@inline
def _look_up(kind, node, counted, levels, candidate):  # type: ignore[no-untyped-def]
    """Record the cells of a candidate's matches and pointers, and where it was found."""
    token = counted.tokens[kind]
    candidate[FOUND_IN], candidate[FOUND_LENGTH], candidate[FOUND_AGE] = -1, 0, 0
    for source in range(SOURCES):
        for level in range(LEVELS):
            row = source * LEVELS + level
            cell = NO_CELL
            if levels.totals[row] > 0:
                votes = counted.votes[kind, row]
                is_newest = 1 if counted.newest[row] == token else 0
                cell = match_cell(levels.cells[row], votes, counted.alive[row], is_newest)
                if votes > 0 and levels.lengths[row] > candidate[FOUND_LENGTH]:
                    candidate[FOUND_IN], candidate[FOUND_LENGTH] = row, levels.lengths[row]
                    candidate[FOUND_AGE] = bit_length(max(0, counted.youngest[row]))
            candidate[CELLS + row] = cell
        cell = NO_CELL
        if counted.predicted[source] != SEPARATOR:
            agrees = 1 if counted.predicted[source] == token else 0
            cell = pointer_cell(source, node[RUNS + source], node[MISSES + source], agrees)
        candidate[CELLS + ROWS + source] = cell


@inline
def _mix(candidate, chances, kind, counted, levels, logits, weights, before, depth):  # type: ignore[no-untyped-def]
    """Compute a candidate's probability: the weighted sum of its inputs' logits, corrected by the last table."""
    value = np.float32(0.0)
    for index in range(TOKEN_INPUT):
        cell = candidate[CELLS + index]
        if cell != NO_CELL:
            value += weights[index] * logits[cell]
    for source in range(SOURCES):
        blended = np.float32(0.0)
        if levels.longest[source] > 0:
            blended = quick_logit(_blend(kind, source, counted, levels))
        chances[BLENDS + source] = blended
        value += weights[BLEND_INPUT + source] * blended
    cell = token_cells(counted.tokens[kind]) + token_share(quick_chance(value))
    candidate[CELLS + TOKEN_INPUT] = cell
    value += weights[TOKEN_INPUT] * logits[cell]
    cell = pair_cells(before, counted.tokens[kind]) + token_share(quick_chance(value))
    candidate[CELLS + PAIR_INPUT] = cell
    value += weights[PAIR_INPUT] * logits[cell]
    chances[MIXED] = quick_chance(value)
    sources = (1 if levels.longest[LOCAL] > 0 else 0) + (2 if levels.longest[GLOBAL] > 0 else 0)
    cell, part = final_cell(depth, sources, value)
    candidate[CELLS + TABLE_INPUTS] = cell if part < 0.5 else cell + 1
    chances[FINAL] = quick_chance((1.0 - part) * logits[cell] + part * logits[cell + 1])


@outline
def estimate(node, candidates, chances, depth, before, evidence, counted, levels, kinds, logits, weights):  # type: ignore[no-untyped-def]
    """Write the probabilities of the first `kinds` candidates of a node, and their inputs.

    before: the token at the node. Returns the sum of the probabilities, at least 1.
    """
    summarize_levels(levels, node, depth, evidence, counted, kinds)
    local, shared = bucket(SET_BUCKET, levels.longest[LOCAL]), bucket(SET_BUCKET, levels.longest[GLOBAL])
    weight_set = local * SET_LENGTHS + shared
    node[WEIGHT_SET] = weight_set
    total = np.float32(0.0)
    for kind in range(kinds):
        candidate = candidates[kind]
        candidate[0] = np.int32(counted.tokens[kind])
        for row in range(ROWS):
            candidate[CANDIDATE_MASKS + row] = counted.masks[kind, row]
        _look_up(kind, node, counted, levels, candidate)
        _mix(candidate, chances[kind], kind, counted, levels, logits, weights[weight_set], before, depth)
        total += chances[kind, FINAL]
    return max(np.float32(1.0), total)
