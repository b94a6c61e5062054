"""Learn from the committed tokens: every candidate that was considered on their path is a training example."""

from __future__ import annotations

import numpy as np

from ssd.kernels.fallback import learn_missed
from ssd.kernels.jit import inline, outline, poke, prefetch
from ssd.kernels.noise import learn_given_noise
from ssd.kernels.probabilities import (
    BLEND_INPUT,
    BLENDS,
    FINAL_SEEN_CAP,
    LEARNING_RATE,
    MIXED,
    NO_CELL,
    SEEN_CAP,
    SOURCES,
    TABLE_INPUTS,
    TOKEN_INPUT,
    TOKEN_SEEN_CAP,
    learn_cell,
)
from ssd.sequences.tables import (
    CANDIDATES,
    CELLS,
    IS_SAMPLED,
    IS_SHARED,
    NODES,
    NOT_ESTIMATED,
    PARENT,
    SIZE,
    TEXT,
    TOKEN,
    TOTALS,
    WEIGHT_SET,
)
from ssd.stats import COMMITTED, HITS, STEPS, record_node

NO_NODE = -1


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
