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
    fast_logit,
    fast_sigmoid,
    final_cell,
    match_cell,
    match_cells,
    pair_cells,
    pointer_cell,
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
    prob = BLEND_PRIOR
    for level in range(LEVELS - 1, -1, -1):
        row = source * LEVELS + level
        if levels.totals[row] > 0:
            prob = (counted.votes[kind, row] + levels.kinds[row] * prob) * levels.per_sample[row]
    return prob


@inline
def fetch_cells(counted, kinds, before, logits):  # type: ignore[no-untyped-def]
    """Prefetch the cells of tokens and pairs, whose tables are too large for the cache."""
    start = logits.ctypes.data
    for kind in range(kinds):
        prefetch(start + 4 * token_cells(counted.tokens[kind]))
        prefetch(start + 4 * pair_cells(before, counted.tokens[kind]))


@inline
def _add_match(row, candidates, estimates, kinds, counted, levels, logits, weight):  # type: ignore[no-untyped-def]
    """Add the inputs of a row of the evidence, and record where candidates were found."""
    cells, alive, newest, length = levels.cells[row], counted.alive[row], counted.newest[row], levels.lengths[row]
    age = bit_length(max(0, counted.newest_ages[row]))
    for kind in range(kinds):
        candidate, votes = candidates[kind], counted.votes[kind, row]
        cell = match_cell(cells, votes, alive, 1 if newest == counted.tokens[kind] else 0)
        candidate[CELLS + row] = cell
        estimates[kind, MIXED] += weight * logits[cell]
        if votes > 0 and length > candidate[FOUND_LENGTH]:
            candidate[FOUND_IN], candidate[FOUND_LENGTH], candidate[FOUND_AGE] = row, length, age


@inline
def _add_pointer(source, candidates, estimates, kinds, node, counted, logits, weight):  # type: ignore[no-untyped-def]
    """Add the inputs of a source's pointer."""
    run, misses, predicted = node[RUNS + source], node[MISSES + source], counted.predicted[source]
    for kind in range(kinds):
        cell = pointer_cell(source, run, misses, 1 if predicted == counted.tokens[kind] else 0)
        candidates[kind, CELLS + ROWS + source] = cell
        estimates[kind, MIXED] += weight * logits[cell]


@inline
def _add_blend(source, estimates, kinds, counted, levels, weight):  # type: ignore[no-untyped-def]
    """Add the inputs of a source's blend."""
    for kind in range(kinds):
        blended = np.float32(0.0)
        if levels.longest[source] > 0:
            blended = fast_logit(_blend(kind, source, counted, levels))
        estimates[kind, BLENDS + source] = blended
        estimates[kind, MIXED] += weight * blended


@inline
def _add_cell(index, cells, kind, candidates, estimates, logits, weight):  # type: ignore[no-untyped-def]
    """Add the input of one of the cells of a token or a pair of tokens, chosen by the mixture so far."""
    cell = cells + token_share(fast_sigmoid(estimates[kind, MIXED]))
    candidates[kind, CELLS + index] = cell
    estimates[kind, MIXED] += weight * logits[cell]


@inline
def _mix(node, candidates, estimates, kinds, counted, levels, logits, weights, before):  # type: ignore[no-untyped-def]
    """Compute the weighted sums of the candidates' inputs, logits, in column MIXED of `estimates`.

    Each input is added for all candidates before the next one, so that the processor overlaps their chains of lookups.
    """
    for kind in range(kinds):
        candidate = candidates[kind]
        candidate[CELLS : CELLS + TOKEN_INPUT] = NO_CELL
        candidate[FOUND_IN], candidate[FOUND_LENGTH], candidate[FOUND_AGE] = -1, 0, 0
        estimates[kind, MIXED] = 0.0
    for row in range(ROWS):
        if levels.totals[row] > 0:
            _add_match(row, candidates, estimates, kinds, counted, levels, logits, weights[row])
    for source in range(SOURCES):
        if counted.predicted[source] != SEPARATOR:
            _add_pointer(source, candidates, estimates, kinds, node, counted, logits, weights[ROWS + source])
    for source in range(SOURCES):
        _add_blend(source, estimates, kinds, counted, levels, weights[BLEND_INPUT + source])
    token_weight, pair_weight = weights[TOKEN_INPUT], weights[PAIR_INPUT]
    for kind in range(kinds):
        _add_cell(TOKEN_INPUT, token_cells(counted.tokens[kind]), kind, candidates, estimates, logits, token_weight)
    for kind in range(kinds):
        _add_cell(
            PAIR_INPUT, pair_cells(before, counted.tokens[kind]), kind, candidates, estimates, logits, pair_weight
        )


@inline
def _correct(candidates, estimates, kinds, levels, logits, depth):  # type: ignore[no-untyped-def]
    """Compute the candidates' probabilities: the mixtures, corrected by the last table; return their sum."""
    sources = (1 if levels.longest[LOCAL] > 0 else 0) + (2 if levels.longest[GLOBAL] > 0 else 0)
    total = np.float32(0.0)
    for kind in range(kinds):
        value = estimates[kind, MIXED]
        estimates[kind, MIXED] = fast_sigmoid(value)
        cell, part = final_cell(depth, sources, value)
        candidates[kind, CELLS + TABLE_INPUTS] = cell if part < 0.5 else cell + 1
        estimates[kind, FINAL] = fast_sigmoid((1.0 - part) * logits[cell] + part * logits[cell + 1])
        total += estimates[kind, FINAL]
    return total


@outline
def estimate(node, candidates, estimates, depth, before, evidence, counted, levels, kinds, logits, weights):  # type: ignore[no-untyped-def]
    """Write the probabilities of the first `kinds` candidates of a node, and their inputs.

    before: the token at the node. Returns the sum of the probabilities.
    """
    summarize_levels(levels, node, depth, evidence, counted, kinds)
    local, shared = bucket(SET_BUCKET, levels.longest[LOCAL]), bucket(SET_BUCKET, levels.longest[GLOBAL])
    weight_set = local * SET_LENGTHS + shared
    node[WEIGHT_SET] = weight_set
    for kind in range(kinds):
        candidates[kind, 0] = np.int32(counted.tokens[kind])
        for row in range(ROWS):
            candidates[kind, CANDIDATE_MASKS + row] = counted.masks[kind, row]
    _mix(node, candidates, estimates, kinds, counted, levels, logits, weights[weight_set], before)
    return _correct(candidates, estimates, kinds, levels, logits, depth)
