"""Growing a draft best-first, until the next node's path odds fall below the price of verifying one more token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ssd.corpus.ring import SEPARATOR
from ssd.kernels.assess import assess
from ssd.kernels.candidates import count_continuations, keep_best
from ssd.kernels.evidence import gather
from ssd.kernels.jit import inline, outline, peek, poke
from ssd.kernels.odds import FINAL, GLOBAL, LEVELS, LOCAL, ROWS, SOURCES
from ssd.sequences.tables import (
    AGE,
    CANDIDATE_MASKS,
    CANDIDATES,
    DEPTH,
    EVIDENCE,
    FOUND_AGE,
    FOUND_IN,
    FOUND_LENGTH,
    GONE,
    KEPT,
    KEPT_FOR_PATH,
    LENGTH,
    MASKS,
    MISSES,
    ODDS,
    PARENT,
    PATH_ODDS,
    RUNS,
    SOURCE,
    TOKEN,
)

PROMISING = np.float32(0.25)
"""Tokens whose shares promise less than this part of the price are not considered."""
RENEWED = np.float32(2.0)
"""A node is matched again if its path odds are so many times the price: the others rarely have children that pay."""


class Growing(NamedTuple):
    """A draft that grows: the tables of `ssd.sequences.tables`, for one sequence."""

    nodes: np.ndarray
    odds: np.ndarray
    candidates: np.ndarray
    chances: np.ndarray


class Limits(NamedTuple):
    """Where a draft ends."""

    price: np.float32
    """Path odds below which a node does not pay."""
    tokens: np.int64
    depth: int
    is_tree: bool
    """Whether a node may have several children."""


class Open(NamedTuple):
    """Candidates that may still be added, by falling path odds."""

    parents: np.ndarray
    kinds: np.ndarray
    """int64: which candidate of its parent."""
    odds: np.ndarray
    """float32 [room, 2]: see ODDS, PATH_ODDS."""


def new_open(nodes: int) -> Open:
    """Room for so many."""
    return Open(np.zeros(nodes, np.int64), np.zeros(nodes, np.int64), np.zeros((nodes, 2), np.float32))


@inline
def write_path(nodes, node, text, size):  # type: ignore[no-untyped-def]
    """Write the path to a node behind the text: occurrences near the text's end continue into it.

    The copies of Ziv and Lempel (1977) do the same.
    """
    while node > 0:
        poke(text, size + nodes[node, DEPTH] - 1, np.uint32(nodes[node, TOKEN]))
        node = nodes[node, PARENT]


@outline
def add_child(growing, parent, child, kind, odds, pointers):  # type: ignore[no-untyped-def]
    """Make a candidate of `parent` the node `child`: what went on with its token agrees with the path to it."""
    nodes, candidate = growing.nodes, growing.candidates[parent, kind]
    depth, token = nodes[parent, DEPTH], np.uint32(candidate[0])
    node = nodes[child]
    node[TOKEN], node[PARENT], node[DEPTH] = candidate[0], parent, depth + 1
    row = candidate[FOUND_IN]
    # Only a pointer says so: that of the request itself is asked first.
    source = (
        row // LEVELS
        if row >= 0
        else LOCAL
        if pointers[LOCAL] != 0 and peek(pointers[LOCAL], depth) == token
        else GLOBAL
    )
    node[SOURCE], node[LENGTH], node[AGE] = source, candidate[FOUND_LENGTH], candidate[FOUND_AGE]
    growing.odds[child, ODDS], growing.odds[child, PATH_ODDS] = odds[ODDS], odds[PATH_ODDS]
    for row in range(ROWS):
        node[MASKS + row] = candidate[CANDIDATE_MASKS + row]
    for source in range(SOURCES):
        node[EVIDENCE + source] = nodes[parent, EVIDENCE + source]
        node[MISSES + source] = GONE
        # A pointer that is gone, or comes to the end of its request, leads nowhere.
        if pointers[source] == 0 or nodes[parent, MISSES + source] >= GONE:
            continue
        said = peek(pointers[source], depth)
        if said != SEPARATOR:
            node[RUNS + source] = nodes[parent, RUNS + source] + 1 if said == token else 0
            node[MISSES + source] = nodes[parent, MISSES + source] + (0 if said == token else 1)


@inline
def _is_lost(node, source):  # type: ignore[no-untyped-def]
    """Whether none of the samples of a source agrees with the path any more."""
    lost = True
    for level in range(LEVELS):
        lost = lost and node[MASKS + source * LEVELS + level] == 0
    return lost


@outline
def renew(node, piece, evidence, own, shared, text, size, depth):  # type: ignore[no-untyped-def]
    """Match again, path included, where a source's samples have all gone another way; returns the next free piece."""
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
def _offer(waiting, opened, room, parent, kind, odds, path_odds):  # type: ignore[no-untyped-def]
    """Insert a candidate among those that wait, of which only `room` can still be added; returns how many wait."""
    place = min(opened, room)
    while place > 0 and waiting.odds[place - 1, PATH_ODDS] < path_odds:
        if place < room:
            waiting.parents[place], waiting.kinds[place] = waiting.parents[place - 1], waiting.kinds[place - 1]
            waiting.odds[place] = waiting.odds[place - 1]
        place -= 1
    if place >= room:
        return opened
    waiting.parents[place], waiting.kinds[place] = parent, kind
    waiting.odds[place, ODDS], waiting.odds[place, PATH_ODDS] = odds, path_odds
    return min(opened + 1, room)


@inline
def _open_children(growing, waiting, opened, room, node, kinds, total, limits):  # type: ignore[no-untyped-def]
    """Let the children of a node wait that pay; returns how many wait."""
    if growing.nodes[node, DEPTH] >= limits.depth:
        return opened
    for kind in range(kinds):
        odds = growing.chances[node, kind, FINAL] / total
        path_odds = growing.odds[node, PATH_ODDS] * odds
        if path_odds >= limits.price:
            opened = _offer(waiting, opened, room, node, kind, odds, path_odds)
    return opened


@outline
def grow(growing, evidence, scratch, pointers, own, shared, text, size, depth, limits, logits, weights):  # type: ignore[no-untyped-def]
    """Grow a draft from a root whose evidence is gathered; returns how many nodes it has, the root included.

    scratch: a `Counted`, a `Levels` and an `Open`. text, size: the sequence's own; a path is written behind it.
    depth: most tokens that are matched.
    """
    counted, levels, waiting = scratch
    most = KEPT if limits.is_tree else KEPT_FOR_PATH
    opened, piece, node, count, written = 0, SOURCES, 0, 1, 0
    while True:
        at = np.int64(growing.nodes[node, DEPTH])
        kinds = count_continuations(counted, growing.nodes[node], at, evidence, pointers)
        kinds = keep_best(counted, kinds, PROMISING * limits.price / growing.odds[node, PATH_ODDS], most)
        growing.nodes[node, CANDIDATES] = kinds
        total = assess(
            growing.nodes[node], growing.candidates[node], growing.chances[node], at, peek(text, size + at - 1),
            evidence, counted, levels, kinds, logits, weights,
        )  # fmt: skip
        if count > limits.tokens:
            return count
        if not limits.is_tree:
            opened = 0
        opened = _open_children(
            growing, waiting, opened, limits.tokens + 1 - count if limits.is_tree else 1, node, kinds, total, limits
        )
        if opened == 0:
            return count
        parent, node = waiting.parents[0], count
        add_child(growing, parent, node, waiting.kinds[0], waiting.odds[0], pointers)
        opened -= 1
        for place in range(opened):
            waiting.parents[place], waiting.kinds[place] = waiting.parents[place + 1], waiting.kinds[place + 1]
            waiting.odds[place] = waiting.odds[place + 1]
        if parent == written:
            poke(text, size + growing.nodes[parent, DEPTH], np.uint32(growing.nodes[node, TOKEN]))
        else:
            write_path(growing.nodes, node, text, size)
        written = node
        count += 1
        if count <= limits.tokens and growing.odds[node, PATH_ODDS] >= RENEWED * limits.price:
            piece = renew(growing.nodes[node], piece, evidence, own, shared, text, size, depth)
