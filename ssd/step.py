"""One drafting step of a batch in one call, without the GIL: learn, commit, match, grow."""

from __future__ import annotations

import numpy as np
from numba import types

from ssd.evidence import NO_LIVE_TIER, Source, gather_placed, new_evidence
from ssd.grow import Growing, Limits, grow
from ssd.jit import Bool, Float, FloatsOut, Int, LongRows, Longs, Tokens, TokensOut, inline, kernel, outline, poke
from ssd.learn import keep_pace, learn, record
from ssd.local import FRESH_ROOM, fold_fresh, insert_fresh
from ssd.match import SPAN_COLUMNS, place_spans
from ssd.odds import GLOBAL, LOCAL, ROWS, SOURCES
from ssd.pointers import MISSED, PLACE, RUN, RingView, address_of, advance_pointers, move_pointer
from ssd.ring import SEPARATOR
from ssd.sequences import (
    DEPTH,
    EVIDENCE,
    FRESH,
    FRESH_SIZE,
    MASKS,
    MISSES,
    NODES,
    ODDS,
    OWNER,
    PARENT,
    PATH_ODDS,
    POINTERS,
    ROOM,
    RUNS,
    SIZE,
    SORTED,
    SORTED_SIZE,
    SOURCE,
    TEXT,
    TOKEN,
)
from ssd.stats import Counters

LOCAL_TIERS = 2
GONE = 99
"""Misses of a pointer that is not there."""

DONE, LACKS_ROOM, BAD_OUTCOME, BAD_TOKEN = range(4)
"""What came of a step; all but DONE had no effect."""


@inline
def check(state, rows, tokens, offsets, verified, accepted, limits):  # type: ignore[no-untyped-def]
    """What is wrong with a step, and with which sequence of it."""
    for token in tokens:
        if token == SEPARATOR:
            return BAD_TOKEN, 0
    for index in range(len(rows)):
        sequence = state[rows[index]]
        if accepted[index] > verified[index] or verified[index] > max(0, sequence[NODES] - 1):
            return BAD_OUTCOME, index
        committed = np.int64(offsets[index + 1]) - np.int64(offsets[index])
        if sequence[SIZE] + committed + limits[index] + 2 > sequence[ROOM]:
            return LACKS_ROOM, index
    return DONE, 0


@outline
def commit(sequence, token, depth):  # type: ignore[no-untyped-def]
    """Append a token to a sequence's text, and the position before it to its order."""
    size = sequence[SIZE]
    poke(sequence[TEXT], size, token)
    if size > 0:
        if sequence[FRESH_SIZE] == FRESH_ROOM:
            sequence[SORTED_SIZE] = fold_fresh(
                sequence[TEXT], sequence[SORTED], sequence[SORTED_SIZE], sequence[FRESH], FRESH_ROOM, depth
            )
            sequence[FRESH_SIZE] = 0
        insert_fresh(sequence[TEXT], sequence[FRESH], sequence[FRESH_SIZE], size, depth)
        sequence[FRESH_SIZE] += 1
    sequence[SIZE] = size + 1


@inline
def point_to_own(tiers, sequence):  # type: ignore[no-untyped-def]
    """Make the two orders of a sequence's own text the tiers of a source."""
    tiers[0, 0], tiers[0, 1], tiers[0, 2] = sequence[TEXT], sequence[SORTED], sequence[SORTED_SIZE]
    tiers[1, 0], tiers[1, 1], tiers[1, 2] = sequence[TEXT], sequence[FRESH], sequence[FRESH_SIZE]


@inline
def _youngest(evidence, piece):  # type: ignore[no-untyped-def]
    """The youngest sample of a piece's longest match."""
    best = 0
    for index in range(1, evidence.counts[piece, 0]):
        if evidence.ages[piece, 0, index] < evidence.ages[piece, 0, best]:
            best = index
    return best


@outline
def set_pointers(sequence, evidence, ring, root, pointers):  # type: ignore[no-untyped-def]
    """Let the pointers follow the longest matches; write where they point, and their state into the root."""
    text = sequence[TEXT]
    if evidence.counts[LOCAL, 0] > 0:
        best = _youngest(evidence, LOCAL)
        position = (evidence.addresses[LOCAL, 0, best] - text) // 4
        move_pointer(sequence, LOCAL, evidence.lengths[LOCAL, 0], position)
    if evidence.counts[GLOBAL, 0] > 0:
        best = _youngest(evidence, GLOBAL)
        # Text in the live tier is gone too soon to be pointed to.
        if evidence.ages[GLOBAL, 0, best] >= 0:
            move_pointer(sequence, GLOBAL, evidence.lengths[GLOBAL, 0], ring.head - 1 - evidence.ages[GLOBAL, 0, best])
    for source in range(SOURCES):
        pointer = sequence[POINTERS + 3 * source : POINTERS + 3 * source + 3]
        pointers[source] = address_of(pointer[PLACE], source, text, ring)
        root[RUNS + source] = pointer[RUN]
        root[MISSES + source] = pointer[MISSED] if pointers[source] != 0 else GONE


@inline
def plant(growing):  # type: ignore[no-untyped-def]
    """Make node 0 the root of a new draft, on the first pieces of evidence."""
    root = growing.nodes[0]
    root[TOKEN], root[PARENT], root[DEPTH] = 0, -1, 0
    for source in range(SOURCES):
        root[EVIDENCE + source] = source
    for row in range(ROWS):
        root[MASKS + row] = -1
    growing.odds[0, ODDS], growing.odds[0, PATH_ODDS] = 1.0, 1.0


_Ints = types.Array(types.int32, 3, "C")
_Floats = types.Array(types.float32, 3, "C")
_Tables = types.Tuple([LongRows, _Ints, _Floats, types.Array(types.int32, 4, "C"), types.Array(types.float32, 4, "C")])
_Batch = types.Tuple([Longs, *[Tokens] * 5])
_View = types.Tuple([LongRows, Longs, Longs])
_Model = types.Tuple(
    [types.Array(types.float32, 2, "C"), types.Array(types.float32, 2, "C"), types.Array(types.float64, 1, "C")]
)
_Counters = types.Tuple([Longs, LongRows, LongRows, LongRows, LongRows, types.Array(types.float64, 2, "C")])


@kernel(_Tables, _Batch, _View, _Model, _Counters, Float, Int, Int, Bool, returns=types.UniTuple(Int, 2))
def step(tables, batch, view, model, counters, cost, depth, max_depth, is_tree):  # type: ignore[no-untyped-def]
    """Take note of what each sequence of a batch committed, and draft for it.

    tables: of `ssd.sequences`. batch: rows, and tokens, offsets, verified, accepted, max_draft as in `Progress`.
    view: tiers, owners and ring of a `View`. model: of `Odds`. counters: of `Stats`. cost: of one more verified token,
    as a part of a step. depth: most tokens matched; max_depth: most tokens in a row drafted.
    Returns what came of it, and the index of the sequence that it is about. The drafts are left in the tables.
    """
    state = tables[0]
    rows, tokens, offsets, verified, accepted, limits = batch
    tiers, owners, ring_of_view = view
    cells, weights, pace = model
    counted = Counters(*counters)
    ring = RingView(ring_of_view[0], ring_of_view[1], ring_of_view[2], ring_of_view[3])
    problem, at = check(state, rows, tokens, offsets, verified, accepted, limits)
    if problem != DONE:
        return problem, at
    on_path = np.zeros(tables[1].shape[1], np.bool_)
    for index in range(len(rows)):
        row = rows[index]
        sequence = state[row]
        growing = Growing(tables[1][row], tables[2][row], tables[3][row], tables[4][row])
        first, end = np.int64(offsets[index]), np.int64(offsets[index + 1])
        if end > first:
            if sequence[NODES] > 0:
                learn(growing, sequence[NODES], tokens, first, end, cells, weights, on_path)
                keep_pace(pace, cost, np.int64(verified[index]), end - first)
            record(counted, growing, on_path, np.int64(verified[index]), end - first)
        for position in range(first, end):
            advance_pointers(sequence, tokens[position], ring)
            commit(sequence, tokens[position], depth)
        sequence[NODES] = 0
    spans = np.empty((len(rows), len(tiers), SPAN_COLUMNS), np.int64)
    for index in range(len(rows)):
        sequence = state[rows[index]]
        if limits[index] > 0:
            place_spans(tiers, spans[index], sequence[TEXT], sequence[SIZE], depth)
    price = np.float32(cost * pace[0] / pace[1])
    evidence = new_evidence(SOURCES * tables[1].shape[1])
    own_tiers = np.empty((LOCAL_TIERS, 3), np.int64)
    own_spans = np.empty((LOCAL_TIERS, SPAN_COLUMNS), np.int64)
    pointers = np.zeros(SOURCES, np.int64)
    newest = (ring.head - 1) % ring.slots
    for index in range(len(rows)):
        row, limit = rows[index], np.int64(limits[index])
        sequence = state[row]
        text, size = sequence[TEXT], sequence[SIZE]
        if limit == 0 or size == 0:
            continue
        growing = Growing(tables[1][row], tables[2][row], tables[3][row], tables[4][row])
        point_to_own(own_tiers, sequence)
        own = Source(own_tiers, own_spans, NO_LIVE_TIER, owners, 0, size, 0)
        shared = Source(tiers, spans[index], len(tiers) - 1, owners, sequence[OWNER], newest, ring.slots)
        place_spans(own_tiers, own_spans, text, size, depth)
        gather_placed(evidence, LOCAL, own, text, size)
        gather_placed(evidence, GLOBAL, shared, text, size)
        plant(growing)
        set_pointers(sequence, evidence, ring, growing.nodes[0], pointers)
        limits_here = Limits(price, limit, max_depth, is_tree)
        sequence[NODES] = grow(growing, evidence, pointers, own, shared, text, size, depth, limits_here, cells, weights)
    return DONE, 0


_Drafts = types.Tuple(
    [TokensOut, types.Array(types.int32, 1, "C"), FloatsOut, types.Array(types.uint8, 1, "C"), TokensOut]
)


@kernel(_Tables, Longs, _Drafts, returns=Int)
def collect(tables, rows, drafts):  # type: ignore[no-untyped-def]
    """Write the drafts of the sequences `rows` into the arrays of a `DraftBatch`; returns how many tokens."""
    tokens, parents, odds, sources, offsets = drafts
    at = 0
    offsets[0] = 0
    for index in range(len(rows)):
        nodes = tables[1][rows[index]]
        for node in range(1, tables[0][rows[index], NODES]):
            tokens[at] = np.uint32(nodes[node, TOKEN])
            parents[at] = nodes[node, PARENT] - 1
            odds[at] = tables[2][rows[index], node, ODDS]
            sources[at] = nodes[node, SOURCE]
            at += 1
        offsets[index + 1] = at
    return at
