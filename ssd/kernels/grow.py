"""Grow a draft best-first, until no candidate's path probability reaches the threshold."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np

from ssd.corpus.ring import SEPARATOR
from ssd.kernels.candidates import CountedTokens, count_continuations, keep_best
from ssd.kernels.estimate import Levels, estimate, fetch_cells
from ssd.kernels.evidence import SearchedText, gather, gather_libraries
from ssd.kernels.fallback import FoundFallbacks, fetch_slots, find_fallbacks
from ssd.kernels.jit import inline, outline, peek, poke
from ssd.kernels.noise import Sampling, estimate_given_noise, fallbacks_given_noise, key_at
from ssd.kernels.probabilities import FINAL, GLOBAL, LEVELS, LOCAL, ROWS, SOURCES
from ssd.sequences.tables import (
    ABSENT,
    AGE,
    CANDIDATE_MASKS,
    CANDIDATES,
    DEPTH,
    EVIDENCE,
    FALLBACK,
    FOUND_AGE,
    FOUND_IN,
    IN_LIBRARIES,
    KEPT,
    KEPT_FOR_PATH,
    LIBRARY,
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

FALLBACK_INDEX = -1
"""Index of candidates that are not among those of the evidence."""
MIN_SCORE = np.float32(0.25)
"""Minimum score of a considered token, as a fraction of the threshold."""
LOWERED = np.float32(0.1)
"""Factor of minimum scores and probabilities where the target's noise may still raise them."""
EXPLORED = np.float32(2.0)
"""Minimum path probability of a node that is searched for again and gets fallback candidates, as a multiple of the
threshold: children of other nodes rarely reach the threshold."""


class Growing(NamedTuple):
    """The draft of one sequence: its part of the tables of `ssd.sequences.tables`."""

    nodes: np.ndarray
    probs: np.ndarray
    candidates: np.ndarray
    estimates: np.ndarray


class Frontier(NamedTuple):
    """Candidates that may be added to the draft, in descending order of path probability."""

    parents: Annotated[np.ndarray, np.int64, "nodes"]
    indices: Annotated[np.ndarray, np.int64, "nodes"]
    """Index among the candidates of the parent, or FALLBACK_INDEX."""
    tokens: Annotated[np.ndarray, np.uint32, "nodes"]
    probs: Annotated[np.ndarray, np.float32, "nodes", 2]
    """Columns PROB and PATH_PROB."""


class DraftContext(NamedTuple):
    """The text that a draft continues, and the texts that are searched for matches of it."""

    text: int
    """Address of the sequence's own text; a path is written after it."""
    size: int
    """Number of its tokens."""
    depth: int
    """Maximum match length in tokens."""
    own: SearchedText
    shared: SearchedText
    libraries: SearchedText
    pointers: np.ndarray
    """int64 [SOURCES]: addresses of the pointers' next tokens, 0 for none."""
    sampling: Sampling


class Scratch(NamedTuple):
    """Arrays for one node at a time, and the frontier."""

    counted: CountedTokens
    levels: Levels
    frontier: Frontier
    found: FoundFallbacks


class Parent(NamedTuple):
    """A node of the draft whose candidates are estimated."""

    node: int
    depth: np.int64
    path_prob: np.float32
    candidates: np.ndarray
    estimates: np.ndarray
    candidate_count: np.int64
    """Number of its candidates, without those of `ssd.kernels.fallback`."""
    total: np.float32
    """Sum of their probabilities."""


class GrowthLimits(NamedTuple):
    """Limits of a draft."""

    threshold: np.float32
    """Minimum path probability of a node that is worth verifying."""
    tokens: np.int64
    is_tree: bool
    """Whether a node may have several children."""


@inline
def _write_path(nodes, node, written, text, size):  # type: ignore[no-untyped-def]
    """Write the path to a node after the text, so that occurrences near the text's end continue into it.

    This is the overlapping copy of Ziv and Lempel (1977). written: the node whose path was written last.
    """
    if nodes[node, PARENT] == written:
        poke(text, size + nodes[node, DEPTH] - 1, np.uint32(nodes[node, TOKEN]))
        return
    while node > 0:
        poke(text, size + nodes[node, DEPTH] - 1, np.uint32(nodes[node, TOKEN]))
        node = nodes[node, PARENT]


@inline
def _set_evidence(node, candidate, depth, pointers):  # type: ignore[no-untyped-def]
    """Record where a node's token was found; samples that the token followed agree with the path to the node.

    depth: that of the node's parent.
    """
    row = candidate[FOUND_IN]
    # A token that follows no sample comes from a pointer; the pointer into the request's text takes precedence.
    source = (
        LIBRARY
        if row == IN_LIBRARIES
        else row // LEVELS
        if row >= 0
        else LOCAL
        if pointers[LOCAL] != 0 and peek(pointers[LOCAL], depth) == np.uint32(node[TOKEN])
        else GLOBAL
    )
    node[SOURCE], node[AGE] = source, candidate[FOUND_AGE]
    for row in range(ROWS):
        node[MASKS + row] = candidate[CANDIDATE_MASKS + row]


@inline
def _set_no_evidence(node):  # type: ignore[no-untyped-def]
    """Record that a node's token is a fallback candidate."""
    node[SOURCE], node[AGE] = FALLBACK, 0
    node[MASKS : MASKS + ROWS] = 0


@outline
def _add_node(growing, child, frontier, written, context):  # type: ignore[no-untyped-def]
    """Add the first candidate of the frontier as node `child`, and write its path after the text.

    written: the node whose path was written last.
    """
    nodes, node, probs, pointers = growing.nodes, growing.nodes[child], frontier.probs[0], context.pointers
    parent, index, token = frontier.parents[0], frontier.indices[0], frontier.tokens[0]
    depth = nodes[parent, DEPTH]
    node[TOKEN], node[PARENT], node[DEPTH] = np.int32(token), parent, depth + 1
    # Before the pointers are read, because a pointer near the text's end predicts tokens of the path.
    _write_path(nodes, child, written, context.text, context.size)
    if index == FALLBACK_INDEX:
        _set_no_evidence(node)
    else:
        _set_evidence(node, growing.candidates[parent, index], depth, pointers)
    growing.probs[child, PROB], growing.probs[child, PATH_PROB] = probs[PROB], probs[PATH_PROB]
    for source in range(SOURCES):
        node[EVIDENCE + source] = nodes[parent, EVIDENCE + source]
        node[MISSES + source] = ABSENT
        # A missing pointer, or one at the end of its request, predicts nothing.
        if pointers[source] == 0 or nodes[parent, MISSES + source] >= ABSENT:
            continue
        predicted = peek(pointers[source], depth)
        if predicted != SEPARATOR:
            node[RUNS + source] = nodes[parent, RUNS + source] + 1 if predicted == token else 0
            node[MISSES + source] = nodes[parent, MISSES + source] + (0 if predicted == token else 1)


@inline
def _is_unmatched(node, source):  # type: ignore[no-untyped-def]
    """Return whether no sample of a source agrees with the path."""
    lost = True
    for level in range(LEVELS):
        lost = lost and node[MASKS + source * LEVELS + level] == 0
    return lost


@outline
def _search_again(node, search, evidence, context):  # type: ignore[no-untyped-def]
    """Search the sources without agreeing samples for the context and the path; return the next search's number."""
    for source in range(SOURCES):
        if not _is_unmatched(node, source):
            continue
        end = context.size + node[DEPTH]
        if source == LOCAL:
            gather(evidence, search, context.own, context.text, end, context.depth)
        else:
            gather(evidence, search, context.shared, context.text, end, context.depth)
            gather_libraries(evidence, search, context.libraries, context.text, end, context.depth)
        evidence.found_at[search] = node[DEPTH]
        node[EVIDENCE + source] = search
        for level in range(LEVELS):
            node[MASKS + source * LEVELS + level] = -1
        search += 1
    return search


@inline
def _move(frontier, place, to):  # type: ignore[no-untyped-def]
    """Copy a candidate to another place of the frontier."""
    frontier.parents[to], frontier.indices[to], frontier.tokens[to] = (
        frontier.parents[place],
        frontier.indices[place],
        frontier.tokens[place],
    )
    frontier.probs[to] = frontier.probs[place]


@inline
def _queue(frontier, queued, room, parent, index, token, prob, path_prob):  # type: ignore[no-untyped-def]
    """Insert a candidate into the frontier, and keep the first `room` there; return their number.

    queued: the number before.
    """
    place = min(queued, room)
    while place > 0 and frontier.probs[place - 1, PATH_PROB] < path_prob:
        if place < room:
            _move(frontier, place - 1, place)
        place -= 1
    if place >= room:
        return queued
    frontier.parents[place], frontier.indices[place], frontier.tokens[place] = parent, index, token
    frontier.probs[place, PROB], frontier.probs[place, PATH_PROB] = prob, path_prob
    return min(queued + 1, room)


@inline
def _queue_children(frontier, queued, room, parent, threshold):  # type: ignore[no-untyped-def]
    """Insert the candidates of a node that reach the threshold into the frontier; return its size."""
    for index in range(parent.candidate_count):
        prob = parent.estimates[index, FINAL] / max(np.float32(1.0), parent.total)
        path_prob = parent.path_prob * prob
        if path_prob >= threshold:
            token = np.uint32(parent.candidates[index, 0])
            queued = _queue(frontier, queued, room, parent.node, index, token, prob, path_prob)
    return queued


@outline
def _queue_fallbacks(found, frontier, queued, room, parent, threshold, model, context):  # type: ignore[no-untyped-def]
    """Insert a node's fallback candidates into the frontier; return its size. found: a `FoundFallbacks`, as scratch."""
    left, sampling = np.float32(1.0) - parent.total, context.sampling
    least = threshold if queued < room else frontier.probs[room - 1, PATH_PROB]
    # This rules out most nodes of a path.
    if left * parent.path_prob < least:
        return queued
    end = context.size + parent.depth
    lowest = least / parent.path_prob * (LOWERED if sampling.is_known else np.float32(1.0))
    count = find_fallbacks(found, model, parent.candidates, parent.candidate_count, context.text, end, left, lowest)
    if sampling.is_known and count > 0:
        fallbacks_given_noise(found, count, left, key_at(sampling, end), model.learned.noise_weights)
    for place in range(count):
        prob = found.probs[place]
        path_prob = parent.path_prob * prob
        # They were reduced if their sum exceeded what is left.
        if path_prob >= threshold:
            queued = _queue(frontier, queued, room, parent.node, FALLBACK_INDEX, found.tokens[place], prob, path_prob)
    return queued


@outline
def _estimate_candidates(growing, node, evidence, scratch, context, limits, model):  # type: ignore[no-untyped-def]
    """Find the candidates of a node and estimate their probabilities.

    Returns a `Parent`, and whether most requests end at the node.
    """
    counted = scratch.counted
    depth, path_prob = np.int64(growing.nodes[node, DEPTH]), growing.probs[node, PATH_PROB]
    candidates, estimates = growing.candidates[node], growing.estimates[node]
    count, is_end = count_continuations(counted, growing.nodes[node], depth, evidence, context.pointers)
    before = peek(context.text, context.size + depth - 1)
    fetch_cells(counted, count, before, model.learned.logits)
    sampling, least = context.sampling, MIN_SCORE * limits.threshold / path_prob
    if sampling.is_known:
        count = keep_best(counted, count, LOWERED * least, KEPT)
    else:
        count = keep_best(counted, count, least, KEPT if limits.is_tree else KEPT_FOR_PATH)
    growing.nodes[node, CANDIDATES] = count
    total = estimate(
        growing.nodes[node], candidates, estimates, count, before, evidence, counted, scratch.levels, model
    )
    if sampling.is_known:
        key = key_at(sampling, context.size + depth)
        total = estimate_given_noise(candidates, estimates, count, total, key, model.learned.noise_weights)
    return Parent(node, depth, path_prob, candidates, estimates, count, total), is_end


@outline
def grow(growing, evidence, scratch, context, limits, model):  # type: ignore[no-untyped-def]
    """Grow a draft from a root whose evidence is gathered; return the number of nodes, the root included."""
    frontier = scratch.frontier
    queued, search, node, count = 0, SOURCES, 0, 1
    while True:
        depth = np.int64(growing.nodes[node, DEPTH])
        is_explored = growing.probs[node, PATH_PROB] >= EXPLORED * limits.threshold
        if is_explored:
            fetch_slots(model.fallback, context.text, context.size + depth)
        parent, is_end = _estimate_candidates(growing, node, evidence, scratch, context, limits, model)
        if not limits.is_tree:
            queued = 0
        room = limits.tokens + 1 - count if limits.is_tree else np.int64(1)
        queued = _queue_children(frontier, queued, room, parent, limits.threshold)
        if is_explored and not is_end:
            queued = _queue_fallbacks(scratch.found, frontier, queued, room, parent, limits.threshold, model, context)
        if queued == 0:
            return count
        _add_node(growing, count, frontier, node, context)
        node = count
        count += 1
        if count > limits.tokens:
            # Nothing can follow, and learning from its candidates gained nothing.
            growing.nodes[node, CANDIDATES] = NOT_ESTIMATED
            return count
        queued -= 1
        for place in range(queued):
            _move(frontier, place + 1, place)
        if growing.probs[node, PATH_PROB] >= EXPLORED * limits.threshold:
            search = _search_again(growing.nodes[node], search, evidence, context)
