"""Decoder layers of a compiled network: norms, rotary positions, attention over pages, and gated feed-forward networks.

The same operations as in `engine.models.decoder`, for few rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.drafters.compiled.matrices import multiply
from engine.sampling.choice import exponentials, softmax_weights
from ssd.kernels.jit import FloatPages, FloatRows, FloatsOut, Int, LongRows, Longs, SmallInts, fields_of, vectorized

# Matrices and norms of a layer: rows of `Network.matrices`, elements of `Network.norms`. Those of the whole network
# follow those of all layers.
QKV, ATTENTION_OUT, GATE_UP, DOWN = range(4)
LAYER_MATRICES = 4
INPUT_NORM, MLP_NORM, QUERY_NORM, KEY_NORM = range(4)
LAYER_NORMS = 4
COMBINE, VOCABULARY = range(2)
"""Matrices of the whole network: the projection of the embedding and the state together, and that to logits."""
EMBEDDING_NORM, STATE_NORM, FINAL_NORM = range(3)
"""Norms of the whole network."""

# Elements of `Network.sizes`.
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INPUT, ZEROES_FIRST, KEEPS_NORMALIZED, STATE = range(9)
"""Numbers of layers, hidden components, heads, heads of keys and components of a head; the kind of input; whether the
embedding at position 1 is replaced with zeros; whether the residual of an input `PAIRS` begins as the normalized state
instead of the state; the kind of state."""
SIZES = 9
TOKENS, COMBINED, PAIRS = range(3)
"""Kinds of input of the first layer: embeddings; embeddings and states, projected to the hidden size; pairs of an
embedding and a state, of which only the attention reads both."""
SUM, NORMALIZED, NO_STATE = range(3)
"""Kinds of the state for the next position: the last layer's output before or after the final norm; none."""

# Places in `Network.floats`.
EPS, TURN_SCALE, FREQUENCIES = range(3)
"""Constant of the norms; factor of cosines and sines; the first frequency of rope."""

NO_NORM = -1


class Network(NamedTuple):
    """Weights and shape of a network."""

    weights: np.ndarray
    """int8: blocks of all matrices."""
    floats: np.ndarray
    """float32: the constants above, then scales, biases and norms."""
    matrices: np.ndarray
    """int64 [matrices, `matrices.COLUMNS`]: `LAYER_MATRICES` of each layer, then those of the network."""
    norms: np.ndarray
    """int64: the place of each norm in `floats`, `NO_NORM` for none; `LAYER_NORMS` of each layer, then those of the
    network."""
    sizes: np.ndarray
    """int64 [SIZES]."""
    embedding: np.ndarray
    """float32 [V, hidden size]."""
    vocabulary: np.ndarray
    """int64: the target's token of each logit; empty if both vocabularies are equal."""


class NetworkCache(NamedTuple):
    """Keys and values of a network's layers in pages."""

    keys: np.ndarray
    """float32 [layers, pages, page size, kv_heads, head_dim]."""
    values: np.ndarray
    """float32, like `keys`."""
    first_slot: int
    """First slot of a sequence that is attended to."""


class NetworkRows(NamedTuple):
    """N tokens that run together. The slot of a token in its sequence is its position."""

    tokens: np.ndarray
    """int64 [N]."""
    positions: np.ndarray
    """int64 [N]."""
    owner: np.ndarray
    """int64 [N]: index of the sequence."""
    pages: np.ndarray
    """int64: page tables of all sequences."""
    starts: np.ndarray
    """int64 [B]: first element of each sequence's page table."""


NETWORK = fields_of(Network, SmallInts, FloatsOut, LongRows, Longs, Longs, FloatRows, Longs)
CACHE = fields_of(NetworkCache, FloatPages, FloatPages, Int)
"""Types in the signatures of kernels."""


@vectorized
def run_layers(network, cache, rows, residual, pairs):
    """Run all layers; `residual`, float32 [N, hidden size], is replaced with the last one's output.

    pairs: float32 [N, 2 * hidden size], input of the first layer's attention if it is of the kind `PAIRS`.
    """
    sizes = network.sizes
    count, hidden, head_dim = len(residual), sizes[HIDDEN], sizes[HEAD_DIM]
    normalized, change = np.empty((count, hidden), np.float32), np.empty((count, hidden), np.float32)
    all_heads = (sizes[HEADS] + 2 * sizes[KV_HEADS]) * head_dim
    heads = np.empty((count, all_heads), np.float32)
    attended = np.empty((count, sizes[HEADS] * head_dim), np.float32)
    turns = _turns(network, rows.positions)
    for layer in range(sizes[LAYERS]):
        first, norms = layer * LAYER_MATRICES, layer * LAYER_NORMS
        if layer == 0 and sizes[INPUT] == PAIRS:
            project(network, first + QKV, pairs, heads)
        else:
            normalize(network, norms + INPUT_NORM, residual, normalized)
            project(network, first + QKV, normalized, heads)
        _rotate(network, norms, turns, heads)
        _store(network, cache, layer, rows, heads)
        _attend(network, cache, layer, rows, heads, attended)
        project(network, first + ATTENTION_OUT, attended, change)
        _add(residual, change)
        normalize(network, norms + MLP_NORM, residual, normalized)
        _feed_forward(network, first, normalized, change)
        _add(residual, change)


@vectorized
def project(network, matrix, rows, out):
    """Write the products of rows with a matrix of the network."""
    multiply(network.weights, network.floats, network.matrices[matrix], rows, out)


@vectorized
def normalize(network, norm, rows, out):
    """Write rows divided by their root mean squares and scaled; unchanged if the network does not have the norm."""
    at, size = network.norms[norm], rows.shape[1]
    for row in range(len(rows)):
        values, normalized = rows[row], out[row]
        if at == NO_NORM:
            normalized[:] = values
            continue
        scale = _inverse_root(values, network.floats[EPS])
        for index in range(size):
            normalized[index] = values[index] * scale * network.floats[at + index]


@vectorized
def _inverse_root(values, eps):
    total = np.float32(0.0)
    for index in range(len(values)):
        total += values[index] * values[index]
    return np.float32(1.0) / np.sqrt(total / np.float32(len(values)) + eps)


@vectorized
def _add(residual, change):
    for row in range(len(residual)):
        total, added = residual[row], change[row]
        for index in range(len(total)):
            total[index] += added[index]


@vectorized
def _turns(network, positions):
    """Return cosines and sines of the angles of each position, float32 [N, 2, head_dim / 2]."""
    half = network.sizes[HEAD_DIM] // 2
    turns = np.empty((len(positions), 2, half), np.float32)
    for row in range(len(positions)):
        position = np.float32(positions[row])
        for index in range(half):
            angle = position * network.floats[FREQUENCIES + index]
            turns[row, 0, index] = np.cos(angle) * network.floats[TURN_SCALE]
            turns[row, 1, index] = np.sin(angle) * network.floats[TURN_SCALE]
    return turns


@vectorized
def _rotate(network, norms, turns, heads):
    """Normalize query and key heads if the network does, and rotate them, in place."""
    sizes = network.sizes
    size, half = sizes[HEAD_DIM], sizes[HEAD_DIM] // 2
    for row in range(len(heads)):
        cos, sin = turns[row, 0], turns[row, 1]
        for head in range(sizes[HEADS] + sizes[KV_HEADS]):
            values = heads[row, head * size : (head + 1) * size]
            at = network.norms[norms + (QUERY_NORM if head < sizes[HEADS] else KEY_NORM)]
            if at != NO_NORM:
                scale = _inverse_root(values, network.floats[EPS])
                for index in range(size):
                    values[index] *= scale * network.floats[at + index]
            for index in range(half):
                left, right = values[index], values[half + index]
                values[index] = left * cos[index] - right * sin[index]
                values[half + index] = right * cos[index] + left * sin[index]


@vectorized
def slot_of(rows, owner, position, page_size):
    """Return the page of a position of a sequence, and the place within it."""
    return rows.pages[rows.starts[owner] + position // page_size], position % page_size


@vectorized
def _store(network, cache, layer, rows, heads):
    """Copy keys and values to the slots of their tokens."""
    sizes = network.sizes
    width, page_size = sizes[KV_HEADS] * sizes[HEAD_DIM], cache.keys.shape[2]
    first = sizes[HEADS] * sizes[HEAD_DIM]
    for row in range(len(heads)):
        page, place = slot_of(rows, rows.owner[row], rows.positions[row], page_size)
        keys, values = cache.keys[layer, page, place], cache.values[layer, page, place]
        for head in range(sizes[KV_HEADS]):
            for index in range(sizes[HEAD_DIM]):
                at = first + head * sizes[HEAD_DIM] + index
                keys[head, index], values[head, index] = heads[row, at], heads[row, at + width]


@vectorized
def _attend(network, cache, layer, rows, heads, attended):
    """Write the attention of each row over the slots up to its own."""
    sizes = network.sizes
    size, sharing, page_size = sizes[HEAD_DIM], sizes[HEADS] // sizes[KV_HEADS], cache.keys.shape[2]
    longest = 0
    for row in range(len(heads)):
        longest = max(longest, rows.positions[row] + 1)
    scores, scratch = np.empty(longest, np.float32), np.empty(longest, np.int32)
    scale = np.float32(1.0 / np.sqrt(size))
    for row in range(len(heads)):
        pages = rows.pages[rows.starts[rows.owner[row]] :]
        count = rows.positions[row] + 1 - cache.first_slot
        for head in range(sizes[HEADS]):
            query = heads[row, head * size : (head + 1) * size]
            for index in range(count):
                position = cache.first_slot + index
                key = cache.keys[layer, pages[position // page_size], position % page_size, head // sharing]
                total = np.float32(0.0)
                for component in range(size):
                    total += query[component] * key[component]
                scores[index] = total * scale
            divisor = softmax_weights(scores[:count], scratch)
            output = attended[row, head * size : (head + 1) * size]
            output[:] = 0
            for index in range(count):
                position, weight = cache.first_slot + index, scores[index] / divisor
                value = cache.values[layer, pages[position // page_size], position % page_size, head // sharing]
                for component in range(size):
                    output[component] += weight * value[component]


@vectorized
def _feed_forward(network, first, rows, out):
    """Write `down(silu(gate) * up)` of rows."""
    size = network.matrices[first + DOWN, 3]
    gate_up = np.empty((len(rows), 2 * size), np.float32)
    gated = np.empty((len(rows), size), np.float32)
    scratch = np.empty(size, np.int32)
    project(network, first + GATE_UP, rows, gate_up)
    for row in range(len(rows)):
        gate, up, product = gate_up[row, :size], gate_up[row, size:], gated[row]
        for index in range(size):
            product[index] = -gate[index]
        exponentials(product, scratch)
        for index in range(size):
            product[index] = gate[index] * up[index] / (np.float32(1.0) + product[index])
    project(network, first + DOWN, gated, out)
