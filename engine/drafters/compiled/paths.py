"""Run a compiled network: over committed tokens, and position by position to draft paths for a batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.drafters.compiled.layers import (
    CACHE,
    COMBINE,
    EMBEDDING_NORM,
    FINAL_NORM,
    HIDDEN,
    INPUT,
    KEEPS_NORMALIZED,
    LAYER_MATRICES,
    LAYER_NORMS,
    LAYERS,
    NETWORK,
    NORMALIZED,
    PAIRS,
    STATE,
    STATE_NORM,
    SUM,
    TOKENS,
    VOCABULARY,
    ZEROES_FIRST,
    NetworkRows,
    normalize,
    project,
    run_layers,
    slot_of,
)
from engine.drafters.compiled.matrices import OUTPUTS
from engine.drafters.pricing import DepthPrice
from engine.sampling.choice import NONE, choose
from ssd.acceptance import DEPTHS, EDGES
from ssd.kernels.jit import (
    Doubles,
    Float,
    FloatRows,
    IntPair,
    LongRows,
    Longs,
    Nothing,
    fields_of,
    kernel,
    vectorized,
)


class PathSettings(NamedTuple):
    """How the paths of B sequences are drafted."""

    lengths: np.ndarray
    """int64 [B]: number of committed tokens."""
    rooms: np.ndarray
    """int64 [B]: largest number of draft tokens."""
    temperatures: np.ndarray
    """float64 [B]: 0 for greedy."""
    seeds: np.ndarray
    """int64 [B]."""
    rates: np.ndarray
    """float32 [2 * DEPTHS, intervals]: see `AcceptanceTable.rates`."""
    price: DepthPrice


class PathTokens(NamedTuple):
    """Paths of B sequences, of at most D tokens."""

    tokens: np.ndarray
    """int64 [B, D]."""
    scores: np.ndarray
    """float32 [B, D]: see `SampledTokens.scores`."""
    accept_prob: np.ndarray
    """float32 [B, D]."""
    counts: np.ndarray
    """int64 [B]: number of tokens of each path."""
    run: np.ndarray
    """int64 [B]: number of these tokens that were run, so that their keys and values are stored."""


SETTINGS = fields_of(PathSettings, Longs, Longs, Doubles, Longs, FloatRows, fields_of(DepthPrice, Float, Float, Float))
PATHS = fields_of(PathTokens, LongRows, FloatRows, FloatRows, Longs, Longs)


@vectorized
def _run(network, cache, rows, hidden, states):
    """Run tokens that follow `states`, float32 [N, S], and replace these; write the input of the logits to `hidden`."""
    sizes = network.sizes
    count, size = len(rows.tokens), sizes[HIDDEN]
    matrices, norms = sizes[LAYERS] * LAYER_MATRICES, sizes[LAYERS] * LAYER_NORMS
    residual, pairs = np.empty((count, size), np.float32), np.empty((count, 2 * size), np.float32)
    for row in range(count):
        residual[row] = network.embedding[rows.tokens[row]]
        if sizes[ZEROES_FIRST] and rows.positions[row] == 1:
            residual[row] = 0
    if sizes[INPUT] != TOKENS:
        normalize(network, norms + EMBEDDING_NORM, residual, hidden)
        pairs[:, :size] = hidden
        normalize(network, norms + STATE_NORM, states, hidden)
        pairs[:, size:] = hidden
        if sizes[INPUT] == PAIRS:
            residual[:] = hidden if sizes[KEEPS_NORMALIZED] else states
        else:
            project(network, matrices + COMBINE, pairs, residual)
    run_layers(network, cache, rows, residual, pairs)
    normalize(network, norms + FINAL_NORM, residual, hidden)
    if sizes[STATE] == NORMALIZED:
        states[:] = hidden
    elif sizes[STATE] == SUM:
        states[:] = residual


@vectorized
def _extend(network, hidden, states, depth, settings, paths, active, tokens, path_prob):
    """Append a token to the path of each active sequence.

    Sequences with room for another one stay active: their indices, states and tokens move to the front. Returns their
    number, and the expected gain of another position.
    """
    matrix = network.sizes[LAYERS] * LAYER_MATRICES + VOCABULARY
    logits = np.empty((len(hidden), network.matrices[matrix, OUTPUTS]), np.float32)
    project(network, matrix, hidden, logits)
    kept, gain = 0, 0.0
    for row in range(len(hidden)):
        own = active[row]
        temperature = np.float32(settings.temperatures[own])
        position = settings.lengths[own] + depth
        chosen, scores = paths.tokens[own, depth : depth + 1], paths.scores[own, depth : depth + 1]
        chosen[0] = NONE
        choose(logits[row], network.vocabulary, temperature, settings.seeds[own], position, chosen, scores)
        token = chosen[0]
        if token == NONE:
            continue
        accept_prob = _accept_prob(settings.rates, temperature > 0, depth, scores[0])
        paths.accept_prob[own, depth] = accept_prob
        paths.counts[own] += 1
        path_prob[own] *= accept_prob
        if paths.counts[own] < settings.rooms[own]:
            active[kept], tokens[kept] = own, token
            states[kept] = states[row]
            gain += max(0.0, path_prob[own] * settings.price.acceptance - settings.price.least)
            kept += 1
    return kept, gain


@vectorized
def _accept_prob(rates, is_sampled, depth, score):
    """Return the probability that a token is accepted, see `AcceptanceTable.accept_prob`; depth: from 0."""
    row = min(depth, DEPTHS - 1) + (DEPTHS if is_sampled else 0)
    return rates[row, np.searchsorted(EDGES, score, side="right")]


@kernel(NETWORK, CACHE, Longs, Longs, Longs, Longs, Longs, FloatRows, FloatRows, FloatRows, returns=Nothing)
def run_rows(network, cache, tokens, positions, owner, pages, starts, stored, hidden, states):
    """Run tokens whose states are stored in the slots before their own.

    The five arrays after the cache are those of `layers.NetworkRows`. stored: float32 [cache slots, S]. Writes the
    inputs of the projection to logits and the states for the next positions: float32 [N, hidden size], [N, S].
    """
    rows = NetworkRows(tokens, positions, owner, pages, starts)
    if states.shape[1] > 0:
        page_size = cache.keys.shape[2]
        for row in range(len(tokens)):
            page, place = slot_of(rows, owner[row], positions[row] - 1, page_size)
            states[row] = stored[page * page_size + place]
    _run(network, cache, rows, hidden, states)


@kernel(NETWORK, CACHE, Longs, Longs, FloatRows, FloatRows, SETTINGS, PATHS, returns=IntPair)
def draft_paths(network, cache, pages, starts, hidden, states, settings, paths):
    """Draft a path for each sequence; return the number of passes, and 1 if a further one was not worthwhile, else 0.

    hidden: float32 [B, hidden size], states: float32 [B, S]: the output after the last committed tokens; overwritten.
    Writes `paths`, whose counts must be 0.
    """
    count, passes = len(hidden), 0
    active, tokens, path_prob = np.arange(count), np.empty(count, np.int64), np.ones(count)
    depths = paths.tokens.shape[1]
    for depth in range(depths):
        extended = _extend(network, hidden[:count], states, depth, settings, paths, active, tokens, path_prob)
        count, gain = extended
        if count == 0 or depth + 1 == depths:
            break
        if settings.price.worthwhile >= 0 and gain <= settings.price.worthwhile:
            return passes, 1
        owner, positions = active[:count], np.empty(count, np.int64)
        for place in range(count):
            positions[place] = settings.lengths[owner[place]] + depth
            paths.run[owner[place]] += 1
        rows = NetworkRows(tokens[:count], positions, owner, pages, starts)
        _run(network, cache, rows, hidden[:count], states[:count])
        passes += 1
    return passes, 0
