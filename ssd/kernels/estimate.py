"""Estimate the probabilities of a node's candidates from their evidence and the learned tables, and learn.

Every candidate that was considered on the path of the committed tokens is a training example.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np

from ssd.corpus.ring import SEPARATOR
from ssd.kernels.candidates import CountedTokens
from ssd.kernels.fallback import learn_missed
from ssd.kernels.jit import bit_length, inline, outline, poke, prefetch
from ssd.kernels.noise import learn_given_noise
from ssd.kernels.probabilities import (
    BLEND_INPUT,
    BLENDS,
    FINAL,
    FINAL_SEEN_CAP,
    GLOBAL,
    LEARNING_RATE,
    LEVELS,
    LOCAL,
    MIXED,
    NO_CELL,
    OF_LIBRARIES,
    OF_SHORTER,
    PAIR_INPUT,
    ROWS,
    SEEN_CAP,
    SET_BUCKET,
    SET_LENGTHS,
    SETS,
    SOURCES,
    TABLE_INPUTS,
    TOKEN_INPUT,
    TOKEN_SEEN_CAP,
    bucket,
    fast_logit,
    fast_sigmoid,
    final_cell,
    learn_cell,
    match_cell,
    match_cells,
    pair_cells,
    pointer_cell,
    second_cells,
    token_cells,
    token_share,
)
from ssd.sequences.tables import (
    CANDIDATE_MASKS,
    CANDIDATES,
    CELLS,
    DEPTH,
    EVIDENCE,
    FOUND_AGE,
    FOUND_IN,
    FOUND_LENGTH,
    IN_LIBRARIES,
    IS_SAMPLED,
    IS_SHARED,
    MISSES,
    NODES,
    NOT_ESTIMATED,
    PARENT,
    RUNS,
    SIZE,
    TEXT,
    TOKEN,
    TOTALS,
    WEIGHT_SET,
)
from ssd.stats import COMMITTED, HITS, STEPS, record_node

BLEND_PRIOR = np.float32(0.02)
"""Probability of a token that no level has seen."""
NO_NODE = -1


class Levels(NamedTuple):
    """Summary of a node's evidence, one row per level of a source."""

    totals: Annotated[np.ndarray, np.int64, ROWS]
    """Occurrences that agree with the path, estimated from the samples; 0 for a row that is not used."""
    lengths: Annotated[np.ndarray, np.int64, ROWS]
    """Tokens that they have in common with the context and the path."""
    different: Annotated[np.ndarray, np.int64, ROWS]
    """Number of different tokens that follow them."""
    longest: Annotated[np.ndarray, np.int64, SOURCES]
    """Length of the longest match of a source, 0 for none."""
    cells: Annotated[np.ndarray, np.int64, ROWS]
    """First cell for their length and count."""
    per_sample: Annotated[np.ndarray, np.float32, ROWS]
    """1 / (samples that agree with the path + different)."""


class Mixture(NamedTuple):
    """Candidates of a node, and what their probabilities are computed from."""

    candidates: np.ndarray
    estimates: np.ndarray
    """Rows of the node in the tables of `ssd.sequences.tables`."""
    candidate_count: int
    """Number of candidates."""
    counted: CountedTokens
    levels: Levels
    logits: np.ndarray
    weights: np.ndarray
    """Weights of the node's set, float32 [INPUTS]."""


@inline
def summarize_levels(levels, node, depth, evidence, counted, count):  # type: ignore[no-untyped-def]
    """Compute the summary; rows that add no occurrences to those of longer matches are not used."""
    second = evidence.second[node[EVIDENCE + GLOBAL]]
    for source in range(SOURCES):
        search, before = node[EVIDENCE + source], 0
        levels.longest[source] = 0
        for level in range(LEVELS):
            row = source * LEVELS + level
            sampled = evidence.counts[search, level]
            if counted.agreeing[row] == 0:
                levels.totals[row] = 0
                continue
            total = counted.agreeing[row]
            if evidence.totals[search, level] > sampled:
                total = total * evidence.totals[search, level] // sampled
            is_apart = source == GLOBAL and level == 1 and second != OF_SHORTER
            # Occurrences of a longer match are not counted again.
            if total <= before and not is_apart:
                levels.totals[row] = 0
                continue
            before = total
            levels.totals[row] = total
            levels.lengths[row] = evidence.lengths[search, level] + depth - evidence.found_at[search]
            levels.longest[source] = max(levels.longest[source], levels.lengths[row])
            different = 0
            for index in range(count):
                different += 1 if counted.samples[index, row] > 0 else 0
            levels.different[row] = max(1, different)
            length = levels.lengths[row]
            levels.cells[row] = second_cells(second, length, total) if is_apart else match_cells(row, length, total)
            levels.per_sample[row] = np.float32(1.0) / np.float32(counted.agreeing[row] + levels.different[row])


@inline
def _blend(index, source, counted, levels, is_second_last):  # type: ignore[no-untyped-def]
    """Return a source's probability of a token: longer matches correct shorter ones (PPM, Cleary and Witten 1984).

    is_second_last: whether the second level corrects the first.
    """
    prob = BLEND_PRIOR
    for at in range(LEVELS - 1, -1, -1):
        row = source * LEVELS + (LEVELS - 1 - at if is_second_last else at)
        if levels.totals[row] > 0:
            prob = (counted.samples[index, row] + levels.different[row] * prob) * levels.per_sample[row]
    return prob


@inline
def fetch_cells(counted, count, before, logits):  # type: ignore[no-untyped-def]
    """Prefetch the cells of tokens and pairs, whose tables are too large for the cache."""
    start = logits.ctypes.data
    for index in range(count):
        prefetch(start + 4 * token_cells(counted.tokens[index]))
        prefetch(start + 4 * pair_cells(before, counted.tokens[index]))


@inline
def _add_match(mixture, row, found_in):  # type: ignore[no-untyped-def]
    """Add the inputs of a row of the evidence, and record where candidates were found; found_in: value of FOUND_IN."""
    counted, levels = mixture.counted, mixture.levels
    cells, agreeing, newest, length = levels.cells[row], counted.agreeing[row], counted.newest[row], levels.lengths[row]
    age, weight = bit_length(max(0, counted.newest_ages[row])), mixture.weights[row]
    for index in range(mixture.candidate_count):
        candidate, samples = mixture.candidates[index], counted.samples[index, row]
        cell = match_cell(cells, samples, agreeing, 1 if newest == counted.tokens[index] else 0)
        candidate[CELLS + row] = cell
        mixture.estimates[index, MIXED] += weight * mixture.logits[cell]
        if samples > 0 and length > candidate[FOUND_LENGTH]:
            candidate[FOUND_IN], candidate[FOUND_LENGTH], candidate[FOUND_AGE] = found_in, length, age


@inline
def _add_pointer(mixture, source, node):  # type: ignore[no-untyped-def]
    """Add the inputs of a source's pointer."""
    run, misses, predicted = node[RUNS + source], node[MISSES + source], mixture.counted.predicted[source]
    weight = mixture.weights[ROWS + source]
    for index in range(mixture.candidate_count):
        cell = pointer_cell(source, run, misses, 1 if predicted == mixture.counted.tokens[index] else 0)
        mixture.candidates[index, CELLS + ROWS + source] = cell
        mixture.estimates[index, MIXED] += weight * mixture.logits[cell]


@inline
def _add_blend(mixture, source, is_second_last):  # type: ignore[no-untyped-def]
    """Add the inputs of a source's blend."""
    weight = mixture.weights[BLEND_INPUT + source]
    for index in range(mixture.candidate_count):
        blended = np.float32(0.0)
        if mixture.levels.longest[source] > 0:
            blended = fast_logit(_blend(index, source, mixture.counted, mixture.levels, is_second_last))
        mixture.estimates[index, BLENDS + source] = blended
        mixture.estimates[index, MIXED] += weight * blended


@inline
def _add_cell(mixture, place, cells, index, weight):  # type: ignore[no-untyped-def]
    """Add the input `place` of a candidate: one of the cells of a token or a pair, chosen by the mixture so far."""
    cell = cells + token_share(fast_sigmoid(mixture.estimates[index, MIXED]))
    mixture.candidates[index, CELLS + place] = cell
    mixture.estimates[index, MIXED] += weight * mixture.logits[cell]


@inline
def _mix(mixture, node, before, second):  # type: ignore[no-untyped-def]
    """Compute the weighted sums of the candidates' inputs, logits, in column MIXED of `estimates`.

    Each input is added for all candidates before the next one, so that the processor overlaps their chains of lookups.
    """
    counted = mixture.counted
    for index in range(mixture.candidate_count):
        candidate = mixture.candidates[index]
        candidate[CELLS : CELLS + TOKEN_INPUT] = NO_CELL
        candidate[FOUND_IN], candidate[FOUND_LENGTH], candidate[FOUND_AGE] = -1, 0, 0
        mixture.estimates[index, MIXED] = 0.0
    for row in range(ROWS):
        if mixture.levels.totals[row] > 0:
            is_library = row == GLOBAL * LEVELS + 1 and second == OF_LIBRARIES
            _add_match(mixture, row, IN_LIBRARIES if is_library else row)
    for source in range(SOURCES):
        if counted.predicted[source] != SEPARATOR:
            _add_pointer(mixture, source, node)
    for source in range(SOURCES):
        _add_blend(mixture, source, second != OF_SHORTER and source == GLOBAL)
    token_weight, pair_weight = mixture.weights[TOKEN_INPUT], mixture.weights[PAIR_INPUT]
    for index in range(mixture.candidate_count):
        _add_cell(mixture, TOKEN_INPUT, token_cells(counted.tokens[index]), index, token_weight)
    for index in range(mixture.candidate_count):
        _add_cell(mixture, PAIR_INPUT, pair_cells(before, counted.tokens[index]), index, pair_weight)


@inline
def _correct(mixture, depth):  # type: ignore[no-untyped-def]
    """Compute the candidates' probabilities: the mixtures, corrected by the last table; return their sum."""
    longest, estimates, logits = mixture.levels.longest, mixture.estimates, mixture.logits
    sources = (1 if longest[LOCAL] > 0 else 0) + (2 if longest[GLOBAL] > 0 else 0)
    total = np.float32(0.0)
    for index in range(mixture.candidate_count):
        value = estimates[index, MIXED]
        estimates[index, MIXED] = fast_sigmoid(value)
        cell, part = final_cell(depth, sources, value)
        mixture.candidates[index, CELLS + TABLE_INPUTS] = cell if part < 0.5 else cell + 1
        estimates[index, FINAL] = fast_sigmoid((1.0 - part) * logits[cell] + part * logits[cell + 1])
        total += estimates[index, FINAL]
    return total


@outline
def estimate(node, candidates, estimates, count, before, evidence, counted, levels, model):  # type: ignore[no-untyped-def]
    """Write the probabilities of the first `count` candidates of a node, and their inputs.

    before: the token at the node. Returns the sum of the probabilities.
    """
    depth = np.int64(node[DEPTH])
    summarize_levels(levels, node, depth, evidence, counted, count)
    local, shared = bucket(SET_BUCKET, levels.longest[LOCAL]), bucket(SET_BUCKET, levels.longest[GLOBAL])
    second = evidence.second[node[EVIDENCE + GLOBAL]] if levels.totals[GLOBAL * LEVELS + 1] > 0 else OF_SHORTER
    weight_set = second * SETS + local * SET_LENGTHS + shared
    node[WEIGHT_SET] = weight_set
    for index in range(count):
        candidates[index, 0] = np.int32(counted.tokens[index])
        for row in range(ROWS):
            candidates[index, CANDIDATE_MASKS + row] = counted.masks[index, row]
    mixture = Mixture(
        candidates, estimates, count, counted, levels, model.learned.logits, model.learned.weights[weight_set]
    )
    _mix(mixture, node, before, second)
    return _correct(mixture, depth)


@inline
def learn_candidate(candidate, estimates, outcome, cells, logits, weights):  # type: ignore[no-untyped-def]
    """Learn from one candidate; outcome: 1.0 if the target produced it, else 0.0."""
    step = np.float32(LEARNING_RATE) * (outcome - estimates[MIXED])
    for index in range(TABLE_INPUTS):
        cell = candidate[CELLS + index]
        if cell != NO_CELL:
            weights[index] += step * logits[cell]
            learn_cell(cells, logits, cell, outcome, TOKEN_SEEN_CAP if index >= TOKEN_INPUT else SEEN_CAP)
    learn_cell(cells, logits, candidate[CELLS + TABLE_INPUTS], outcome, FINAL_SEEN_CAP)
    for source in range(SOURCES):
        weights[BLEND_INPUT + source] += step * estimates[BLENDS + source]


@inline
def _child_of(nodes, count, node, token):  # type: ignore[no-untyped-def]
    """Return the child of a node with this token, or NO_NODE."""
    for child in range(node + 1, count):
        if nodes[child, PARENT] == node and np.uint32(nodes[child, TOKEN]) == token:
            return child
    return NO_NODE


@inline
def fetch_updated_cells(growing, node, cells, logits):  # type: ignore[no-untyped-def]
    """Prefetch the cells of tokens and pairs that are updated at a node: 8 bytes each, and 4 for their logits."""
    for at in range(growing.nodes[node, CANDIDATES]):
        for index in range(TOKEN_INPUT, TABLE_INPUTS):
            cell = np.int64(growing.candidates[node, at, CELLS + index])
            prefetch(cells.ctypes.data + 8 * cell)
            prefetch(logits.ctypes.data + 4 * cell)


@inline
def learn_node(node, candidates, estimates, token, model):  # type: ignore[no-untyped-def]
    """Learn from the candidates of a node; return whether one of them was `token`."""
    was_right = False
    weights = model.learned.weights[node[WEIGHT_SET]]
    for at in range(node[CANDIDATES]):
        is_right = np.uint32(candidates[at, 0]) == token
        outcome = np.float32(1.0) if is_right else np.float32(0.0)
        learn_candidate(candidates[at], estimates[at], outcome, model.learned.cells, model.learned.logits, weights)
        was_right = was_right or is_right
    return was_right


@outline
def learn(growing, sequence, tokens, model, accepted):  # type: ignore[no-untyped-def]
    """Learn at each node of a sequence's draft that is on the path of the committed tokens.

    accepted: uint8 [nodes], set for the nodes on the path.
    """
    node, count, text, size = np.int64(0), sequence[NODES], sequence[TEXT], sequence[SIZE]
    accepted[:count] = 0
    # Contexts are read from the text, so the tokens are written there before they are committed, over the last path.
    for index in range(len(tokens)):
        poke(text, size + index, tokens[index])
    for index in range(len(tokens)):
        if growing.nodes[node, CANDIDATES] == NOT_ESTIMATED:
            return
        token, candidates = tokens[index], growing.candidates[node]
        if sequence[IS_SAMPLED] != 0:
            count_here, weights = growing.nodes[node, CANDIDATES], model.learned.noise_weights
            learn_given_noise(candidates, growing.estimates[node], count_here, token, weights)
        fetch_updated_cells(growing, node, model.learned.cells, model.learned.logits)
        if not learn_node(growing.nodes[node], candidates, growing.estimates[node], token, model):
            candidate_count = growing.nodes[node, CANDIDATES]
            learn_missed(model, candidates, candidate_count, text, size + index, token, sequence[IS_SHARED] != 0)
        node = _child_of(growing.nodes, count, node, token)
        if node == NO_NODE:
            return
        accepted[node] = 1


@outline
def record(counters, sequence, growing, accepted, verified, committed, steps):  # type: ignore[no-untyped-def]
    """Add steps to the statistics and to the sequence's totals.

    In the first one the target verified the first `verified` tokens of the draft.
    """
    counters.steps[STEPS] += steps
    counters.steps[COMMITTED] += committed
    counters.steps[HITS] += 1 if verified > 0 else 0
    for node in range(1, verified + 1):
        record_node(counters, growing.nodes[node], growing.probs[node], accepted[node])
        sequence[TOTALS + 3] += accepted[node]
    sequence[TOTALS] += steps
    sequence[TOTALS + 1] += committed
    sequence[TOTALS + 2] += verified
