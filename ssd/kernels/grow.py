"""Grow a draft best-first, until the next node's path probability is below the price of one more verified token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ssd.corpus.ring import SEPARATOR
from ssd.kernels.candidates import count_continuations, keep_best
from ssd.kernels.estimate import estimate, fetch_cells
from ssd.kernels.evidence import gather
from ssd.kernels.fallback import add_fallbacks, fetch_slots
from ssd.kernels.jit import inline, outline, peek, poke
from ssd.kernels.probabilities import FINAL, GLOBAL, LEVELS, LOCAL, ROWS, SOURCES
from ssd.sequences.tables import (
    AGE,
    CANDIDATE_MASKS,
    CANDIDATES,
    DEPTH,
    EVIDENCE,
    FALLBACKS,
    FOUND_AGE,
    FOUND_IN,
    FOUND_LENGTH,
    GONE,
    KEPT,
    KEPT_FOR_PATH,
    LENGTH,
    MASKS,
    MISSES,
    NOT_ESTIMATED,
    PARENT,
    PATH_PROB,
    PROB,
    RUNS,
    SOURCE,
    TOKEN,
)

MIN_SCORE = np.float32(0.25)
"""Minimum score of a considered token, as a fraction of the price."""
EXPLORED = np.float32(2.0)
"""Minimum path probability of a node that is searched for again and gets fallback candidates, as a multiple of the
price: children of other nodes rarely exceed the price."""


class Growing(NamedTuple):
    """The draft of one sequence: its part of the tables of `ssd.sequences.tables`."""

    nodes: np.ndarray
    probs: np.ndarray
    candidates: np.ndarray
    chances: np.ndarray


class Limits(NamedTuple):
    """Limits of a draft."""

    price: np.float32
    """Minimum path probability of a node that is worth verifying."""
    tokens: np.int64
    depth: int
    is_tree: bool
    """Whether a node may have several children."""


class Open(NamedTuple):
    """Candidates that may still be added, in descending order of path probability."""

    parents: np.ndarray
    kinds: np.ndarray
    """int64: index among the candidates of the parent."""
    probs: np.ndarray
    """float32 [room, 2]: columns PROB and PATH_PROB."""


def new_open(nodes: int) -> Open:
    """Allocate the arrays for `nodes` candidates."""
    return Open(np.zeros(nodes, np.int64), np.zeros(nodes, np.int64), np.zeros((nodes, 2), np.float32))


@inline
def write_path(nodes, node, text, size):  # type: ignore[no-untyped-def]
    """Write the path to a node after the text, so that occurrences near the text's end continue into it.

    This is the overlapping copy of Ziv and Lempel (1977).
    """
    while node > 0:
        poke(text, size + nodes[node, DEPTH] - 1, np.uint32(nodes[node, TOKEN]))
        node = nodes[node, PARENT]


@outline
def add_child(growing, parent, child, kind, probs, pointers):  # type: ignore[no-untyped-def]
    """Add a candidate of `parent` as node `child`; samples that its token followed agree with the path to it."""
    nodes, candidate = growing.nodes, growing.candidates[parent, kind]
    depth, token = nodes[parent, DEPTH], np.uint32(candidate[0])
    node = nodes[child]
    node[TOKEN], node[PARENT], node[DEPTH] = candidate[0], parent, depth + 1
    row = candidate[FOUND_IN]
    # A token that follows no sample comes from a pointer; the pointer into the request's text takes precedence.
    source = (
        row // LEVELS
        if row >= 0
        else LOCAL
        if pointers[LOCAL] != 0 and peek(pointers[LOCAL], depth) == token
        else GLOBAL
    )
    node[SOURCE], node[LENGTH], node[AGE] = source, candidate[FOUND_LENGTH], candidate[FOUND_AGE]
    growing.probs[child, PROB], growing.probs[child, PATH_PROB] = probs[PROB], probs[PATH_PROB]
    for row in range(ROWS):
        node[MASKS + row] = candidate[CANDIDATE_MASKS + row]
    for source in range(SOURCES):
        node[EVIDENCE + source] = nodes[parent, EVIDENCE + source]
        node[MISSES + source] = GONE
        # A missing pointer, or one at the end of its request, predicts nothing.
        if pointers[source] == 0 or nodes[parent, MISSES + source] >= GONE:
            continue
        predicted = peek(pointers[source], depth)
        if predicted != SEPARATOR:
            node[RUNS + source] = nodes[parent, RUNS + source] + 1 if predicted == token else 0
            node[MISSES + source] = nodes[parent, MISSES + source] + (0 if predicted == token else 1)


@inline
def _is_lost(node, source):  # type: ignore[no-untyped-def]
    """Return whether no sample of a source agrees with the path."""
    lost = True
    for level in range(LEVELS):
        lost = lost and node[MASKS + source * LEVELS + level] == 0
    return lost


@outline
def renew(node, piece, evidence, own, shared, text, size, depth):  # type: ignore[no-untyped-def]
    """Search for the context and the path again in sources without agreeing samples; return the next free piece."""
    for source in range(SOURCES):
        if not _is_lost(node, source):
            continue
        end = size + node[DEPTH]
        if source == LOCAL:
            gather(evidence, piece, own, text, end, depth)
        else:
            gather(evidence, piece, shared, text, end, depth)
        evidence.found_at[piece] = node[DEPTH]
        node[EVIDENCE + source] = piece
        for level in range(LEVELS):
            node[MASKS + source * LEVELS + level] = -1
        piece += 1
    return piece


@inline
def _offer(waiting, opened, room, parent, kind, prob, path_prob):  # type: ignore[no-untyped-def]
    """Insert a candidate into the sorted waiting ones, and keep the first `room` of them; return their number."""
    place = min(opened, room)
    while place > 0 and waiting.probs[place - 1, PATH_PROB] < path_prob:
        if place < room:
            waiting.parents[place], waiting.kinds[place] = waiting.parents[place - 1], waiting.kinds[place - 1]
            waiting.probs[place] = waiting.probs[place - 1]
        place -= 1
    if place >= room:
        return opened
    waiting.parents[place], waiting.kinds[place] = parent, kind
    waiting.probs[place, PROB], waiting.probs[place, PATH_PROB] = prob, path_prob
    return min(opened + 1, room)


@inline
def _open_children(growing, waiting, opened, room, node, first, end, total, limits):  # type: ignore[no-untyped-def]
    """Insert candidates of a node that are worth verifying into the waiting ones; return the number of these.

    first, end: indices of the candidates. total: the sum that their probabilities are divided by.
    """
    if growing.nodes[node, DEPTH] >= limits.depth:
        return opened
    for kind in range(first, end):
        prob = growing.chances[node, kind, FINAL] / total
        path_prob = growing.probs[node, PATH_PROB] * prob
        if path_prob >= limits.price:
            opened = _offer(waiting, opened, room, node, kind, prob, path_prob)
    return opened


@outline
def grow(growing, evidence, scratch, pointers, own, shared, text, size, depth, limits, model):  # type: ignore[no-untyped-def]
    """Grow a draft from a root whose evidence is gathered; return the number of nodes, the root included.

    scratch: a `Counted`, a `Levels` and an `Open`. text, size: the sequence's own text; a path is written after it.
    depth: maximum match length in tokens.
    """
    counted, levels, waiting = scratch
    most = KEPT if limits.is_tree else KEPT_FOR_PATH
    opened, piece, node, count, written = 0, SOURCES, 0, 1, 0
    while True:
        at = np.int64(growing.nodes[node, DEPTH])
        candidates, chances, path_prob = growing.candidates[node], growing.chances[node], growing.probs[node, PATH_PROB]
        is_explored = node == 0 or path_prob >= EXPLORED * limits.price
        if is_explored:
            fetch_slots(model.fallback, text, size + at)
        kinds, is_end = count_continuations(counted, growing.nodes[node], at, evidence, pointers)
        before = peek(text, size + at - 1)
        fetch_cells(counted, kinds, before, model.logits)
        kinds = keep_best(counted, kinds, MIN_SCORE * limits.price / path_prob, most)
        growing.nodes[node, CANDIDATES], growing.nodes[node, FALLBACKS] = kinds, 0
        total = estimate(
            growing.nodes[node], candidates, chances, at, before,
            evidence, counted, levels, kinds, model.logits, model.weights,
        )  # fmt: skip
        if is_explored and not is_end:
            # Those of the root are all learned from, whatever the price.
            least = np.float32(0.0) if node == 0 else limits.price / path_prob
            left = max(np.float32(0.0), np.float32(1.0) - total)
            add_fallbacks(
                model.fallback, growing.nodes[node], candidates, chances, left, text, size + at, least, model.logits
            )
        if not limits.is_tree:
            opened = 0
        room = limits.tokens + 1 - count if limits.is_tree else np.int64(1)
        end = KEPT + growing.nodes[node, FALLBACKS]
        opened = _open_children(growing, waiting, opened, room, node, 0, kinds, max(np.float32(1.0), total), limits)
        opened = _open_children(growing, waiting, opened, room, node, KEPT, end, np.float32(1.0), limits)
        if opened == 0:
            return count
        parent, node = waiting.parents[0], count
        add_child(growing, parent, node, waiting.kinds[0], waiting.probs[0], pointers)
        count += 1
        if count > limits.tokens:
            # Nothing can follow, and learning from its candidates gained nothing.
            growing.nodes[node, CANDIDATES], growing.nodes[node, FALLBACKS] = NOT_ESTIMATED, 0
            return count
        opened -= 1
        for place in range(opened):
            waiting.parents[place], waiting.kinds[place] = waiting.parents[place + 1], waiting.kinds[place + 1]
            waiting.probs[place] = waiting.probs[place + 1]
        if parent == written:
            poke(text, size + growing.nodes[parent, DEPTH], np.uint32(growing.nodes[node, TOKEN]))
        else:
            write_path(growing.nodes, node, text, size)
        written = node
        if growing.probs[node, PATH_PROB] >= EXPLORED * limits.price:
            piece = renew(growing.nodes[node], piece, evidence, own, shared, text, size, depth)
