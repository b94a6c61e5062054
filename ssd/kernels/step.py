"""One drafting step of a batch in one call without the GIL: learn, commit, match, grow.

All arrays that it uses are passed as one, the frame: settings of a drafter and addresses.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
from numba import types

from ssd.budget.token_budget import TokenBudget
from ssd.corpus.ring import SEPARATOR
from ssd.corpus.rollout import NO_TAG
from ssd.corpus.view import RING_HEAD, RING_OLDEST, RING_SLOTS, RING_TEXT, open_view
from ssd.kernels.arrays import addresses_of, allocate, arrays_in, opener
from ssd.kernels.budget import Budget, is_line, least_path_prob, select, update_rate
from ssd.kernels.estimate import learn, record
from ssd.kernels.evidence import NO_LIVE_TIER, Evidence, SearchedText, gather_libraries, gather_placed
from ssd.kernels.fallback import Fallback
from ssd.kernels.grow import DraftContext, Growing, GrowthLimits, Scratch, grow
from ssd.kernels.jit import (
    Bytes,
    Float,
    FloatsOut,
    Int,
    Ints,
    LongRows,
    Longs,
    Tokens,
    TokensOut,
    acquire,
    inline,
    kernel,
    outline,
    poke,
    release,
)
from ssd.kernels.learned import LearnedTables
from ssd.kernels.live import enter, leave, open_live
from ssd.kernels.match import (
    SPAN_COLUMNS,
    TIER_COLUMNS,
    TIER_NEWEST,
    TIER_SIZE,
    TIER_SUFFIXES,
    TIER_TEXT,
    place_all,
    place_spans,
)
from ssd.kernels.noise import Sampling
from ssd.kernels.pointers import MISSED, PLACE, RUN, RingView, address_of, advance_pointers, move_pointer
from ssd.kernels.probabilities import GLOBAL, LOCAL, ROWS, SOURCES
from ssd.sequences.local_index import FRESH_ROOM, fold_fresh, insert_fresh
from ssd.sequences.tables import (
    ABSENT,
    DEPTH,
    EVIDENCE,
    FRESH,
    FRESH_SIZE,
    HINTED,
    IS_SAMPLED,
    MASKS,
    MISSES,
    NODES,
    OWNER,
    PARENT,
    PATH_PROB,
    POINTERS,
    PROB,
    ROOM,
    RUNS,
    SEED,
    SIZE,
    SORTED,
    SORTED_SIZE,
    SOURCE,
    TAG,
    TEXT,
    TOKEN,
    Sequences,
    Tables,
)
from ssd.stats import Counters, Stats

LOCAL_TIERS = 2


class Model(NamedTuple):
    """The learned tables and the counted tokens of a corpus."""

    learned: LearnedTables
    fallback: Fallback


class Own(NamedTuple):
    """Scratch arrays of one sequence."""

    tiers: Annotated[np.ndarray, np.int64, LOCAL_TIERS, TIER_COLUMNS]
    """Tiers of its own text."""
    spans: Annotated[np.ndarray, np.int64, LOCAL_TIERS, SPAN_COLUMNS]
    pointers: Annotated[np.ndarray, np.int64, SOURCES]
    """Addresses of the pointers' next tokens, 0 for none."""
    on_path: Annotated[np.ndarray, np.uint8, "nodes"]
    """1 for accepted nodes."""


class StepArrays(NamedTuple):
    """All arrays of a step."""

    tables: Tables
    model: Model
    budget: Budget
    counters: Counters
    evidence: Evidence
    scratch: Scratch
    own: Own


NUMBERS = ("rows", "nodes", "searches", "match_depth", "is_tree")
"""Numbers before the addresses: sizes of arrays, and settings."""
MATCH_DEPTH, IS_TREE = NUMBERS.index("match_depth"), NUMBERS.index("is_tree")
open_frame = opener(StepArrays, *NUMBERS)
"""Returns the `StepArrays` of `StepFrame.addresses`."""


class StepFrame:
    """The addresses for one drafter; a new one is made when its tables grow."""

    def __init__(
        self,
        sequences: Sequences,
        model: Model,
        budget: TokenBudget,
        stats: Stats,
        *,
        match_depth: int,
        is_tree: bool,
    ) -> None:
        """match_depth: maximum match length in tokens. is_tree: whether a node may have several children."""
        rows, nodes = sequences.tables.probs.shape[:2]
        searches = SOURCES * nodes
        scratch = allocate(Evidence, searches=searches), allocate(Scratch, nodes=nodes), allocate(Own, nodes=nodes)
        self.arrays = StepArrays(sequences.tables, model, budget.arrays, stats.counters, *scratch)
        self.addresses = addresses_of(self.arrays, rows, nodes, searches, match_depth, is_tree)
        """int64."""
        self.nbytes = sum(array.nbytes for array in arrays_in(scratch))
        """Memory of the scratch arrays."""


DONE, NEEDS_ROOM, REFUSED = range(3)
"""Results of a step; all but DONE have no effect. `Progress.check` says why one is refused."""


class CommittedBatch(NamedTuple):
    """Sequences and their progress, B sequences and T tokens."""

    rows: np.ndarray
    """int64 [B]: the sequences' rows in the tables."""
    tokens: np.ndarray
    offsets: np.ndarray
    verified: np.ndarray
    limits: np.ndarray
    """`max_draft` of `ssd.types.Progress`; the other arrays have the names of its fields."""
    steps: np.ndarray
    """Empty if each sequence took one step."""


class DraftedArrays(NamedTuple):
    """The arrays of a `ssd.types.DraftBatch`, which are written."""

    tokens: np.ndarray
    parents: np.ndarray
    accept_prob: np.ndarray
    sources: np.ndarray
    offsets: np.ndarray


@inline
def _arrays_fit(batch):  # type: ignore[no-untyped-def]
    """Return whether the arrays fit together, as `Progress.check_arrays` requires."""
    count, offsets = len(batch.rows), batch.offsets
    if len(offsets) != count + 1 or len(batch.verified) != count:
        return False
    if len(batch.limits) != count or len(batch.steps) not in (0, count):
        return False
    for index in range(count):
        if offsets[index] > offsets[index + 1]:
            return False
    return offsets[0] == 0 and offsets[count] == len(batch.tokens)


@inline
def check(state, batch, max_draft):  # type: ignore[no-untyped-def]
    """Return the result of checking a step, and the index of a sequence that needs room."""
    if not _arrays_fit(batch):
        return REFUSED, 0
    for token in batch.tokens:
        if token == SEPARATOR:
            return REFUSED, 0
    for index in range(len(batch.rows)):
        sequence = state[batch.rows[index]]
        if batch.verified[index] > max(0, sequence[NODES] - 1):
            return REFUSED, index
        committed = np.int64(batch.offsets[index + 1]) - np.int64(batch.offsets[index])
        if sequence[SIZE] + committed + min(np.int64(batch.limits[index]), max_draft) + 2 > sequence[ROOM]:
            return NEEDS_ROOM, index
    return DONE, 0


@outline
def commit(sequence, token, depth):  # type: ignore[no-untyped-def]
    """Append a token to a sequence's text, and its position to the local index."""
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
    """Set the tiers of a source to the two suffix arrays of a sequence's own text."""
    tiers[0, TIER_SUFFIXES], tiers[0, TIER_SIZE] = sequence[SORTED], sequence[SORTED_SIZE]
    tiers[1, TIER_SUFFIXES], tiers[1, TIER_SIZE] = sequence[FRESH], sequence[FRESH_SIZE]
    for tier in range(LOCAL_TIERS):
        tiers[tier, TIER_TEXT], tiers[tier, TIER_NEWEST] = sequence[TEXT], sequence[SIZE]


@inline
def _newest_sample(evidence, search):  # type: ignore[no-untyped-def]
    """Return the newest sample of a search's longest match."""
    best = 0
    for index in range(1, evidence.counts[search, 0]):
        if evidence.ages[search, 0, index] < evidence.ages[search, 0, best]:
            best = index
    return best


@outline
def set_pointers(sequence, evidence, ring, root, pointers):  # type: ignore[no-untyped-def]
    """Move the pointers to the longest matches; write their addresses, and their state into the root."""
    text = sequence[TEXT]
    if evidence.counts[LOCAL, 0] > 0:
        best = _newest_sample(evidence, LOCAL)
        position = (evidence.addresses[LOCAL, 0, best] - text) // 4
        move_pointer(sequence, LOCAL, evidence.lengths[LOCAL, 0], position)
    if evidence.counts[GLOBAL, 0] > 0:
        best = _newest_sample(evidence, GLOBAL)
        # Text in the live tier is removed too soon for pointers.
        if evidence.ages[GLOBAL, 0, best] >= 0:
            move_pointer(sequence, GLOBAL, evidence.lengths[GLOBAL, 0], ring.head - 1 - evidence.ages[GLOBAL, 0, best])
    for source in range(SOURCES):
        pointer = sequence[POINTERS + 3 * source : POINTERS + 3 * source + 3]
        pointers[source] = address_of(pointer[PLACE], source, text, ring)
        root[RUNS + source] = pointer[RUN]
        root[MISSES + source] = pointer[MISSED] if pointers[source] != 0 else ABSENT


@inline
def add_root(growing):  # type: ignore[no-untyped-def]
    """Make node 0 the root of a new draft, with the evidence of the first searches."""
    root = growing.nodes[0]
    root[TOKEN], root[PARENT], root[DEPTH] = 0, -1, 0
    for source in range(SOURCES):
        root[EVIDENCE + source] = source
    for row in range(ROWS):
        root[MASKS + row] = -1
    growing.probs[0, PROB], growing.probs[0, PATH_PROB] = 1.0, 1.0


@inline
def _growing(tables, row):  # type: ignore[no-untyped-def]
    """Return the draft of the sequence of a row."""
    return Growing(tables.nodes[row], tables.probs[row], tables.candidates[row], tables.estimates[row])


@inline
def commit_all(arrays, batch, ring, depth):  # type: ignore[no-untyped-def]
    """Learn from the committed tokens of each sequence, count them, and append them to its text."""
    tables, model, on_path = arrays.tables, arrays.model, arrays.own.on_path
    drafted, tokens, tried = 0, 0.0, np.int64(0)
    for index in range(len(batch.rows)):
        row = batch.rows[index]
        sequence, verified = tables.state[row], np.int64(batch.verified[index])
        first, end = np.int64(batch.offsets[index]), np.int64(batch.offsets[index + 1])
        taken = max(np.int64(1), np.int64(batch.steps[index])) if len(batch.steps) else np.int64(1)
        if end > first:
            growing = _growing(tables, row)
            if sequence[NODES] > 0:
                acquire(model.fallback.lock)
                learn(growing, sequence, batch.tokens[first:end], model, on_path)
                release(model.fallback.lock)
                drafted, tokens, tried = drafted + 1, tokens + (end - first) / taken, tried + verified
            record(arrays.counters, sequence, growing, on_path, verified, end - first, taken)
        for position in range(first, end):
            advance_pointers(sequence, batch.tokens[position], ring)
            commit(sequence, batch.tokens[position], depth)
        sequence[NODES] = 0
    if drafted > 0 and np.any(batch.limits):  # Not for sequences that end, which are a part of their step.
        update_rate(arrays.budget, drafted, tokens, tried, 0.0)


@inline
def spans_and_contexts(state, batch, tiers):  # type: ignore[no-untyped-def]
    """Return arrays for `place_all`: spans of each sequence, and where its context ends."""
    spans = np.empty((len(batch.rows), len(tiers), SPAN_COLUMNS), np.int64)
    contexts = np.empty((len(batch.rows), 2), np.int64)
    for index in range(len(batch.rows)):
        sequence = state[batch.rows[index]]
        contexts[index, 0], contexts[index, 1] = sequence[TEXT], sequence[SIZE] if batch.limits[index] > 0 else 0
    return spans, contexts


@inline
def _searched_alone(tiers, spans, shared):  # type: ignore[no-untyped-def]
    """Return a searched text without running requests and groups; the unused arrays are those of another one."""
    return SearchedText(tiers, spans, NO_LIVE_TIER, shared.owners, 0, NO_TAG, shared.tags, shared.live_tags)


@inline
def draft(arrays, growing, sequence, shared, libraries, ring, depth, limits):  # type: ignore[no-untyped-def]
    """Draft for a sequence with a context; return the number of nodes, the root included.

    shared, libraries: `SearchedText`s; the spans of the first are placed.
    """
    evidence, own, text, size = arrays.evidence, arrays.own, sequence[TEXT], sequence[SIZE]
    point_to_own(own.tiers, sequence)
    place_spans(own.tiers, own.spans, text, size, depth)
    local = _searched_alone(own.tiers, own.spans, shared)
    gather_placed(evidence, LOCAL, local, text, size)
    gather_placed(evidence, GLOBAL, shared, text, size)
    gather_libraries(evidence, GLOBAL, libraries, text, size, depth)
    add_root(growing)
    set_pointers(sequence, evidence, ring, growing.nodes[0], own.pointers)
    sampling = Sampling(sequence[IS_SAMPLED] != 0, sequence[SEED], sequence[HINTED])
    context = DraftContext(text, size, depth, local, shared, libraries, own.pointers, sampling)
    return grow(growing, evidence, arrays.scratch, context, limits, arrays.model)


@inline
def select_all(arrays, batch, drafts):  # type: ignore[no-untyped-def]
    """Cut the drafts of a batch, of `drafts` tokens together, to the tokens that are worth verifying."""
    tables, offsets = arrays.tables, np.empty(len(batch.rows) + 1, np.int64)
    lengths = np.empty(len(batch.rows), np.int64)
    probs = np.empty(drafts, np.float32)
    at = 0
    for index in range(len(batch.rows)):
        offsets[index], row = at, batch.rows[index]
        for node in range(1, tables.state[row, NODES]):
            probs[at] = tables.probs[row, node, PATH_PROB]
            at += 1
    offsets[len(batch.rows)] = at
    select(arrays.budget, probs, offsets, lengths)
    for index in range(len(batch.rows)):
        sequence = tables.state[batch.rows[index]]
        sequence[NODES] = min(sequence[NODES], lengths[index] + 1)


@inline
def write_drafts(tables, batch, drafted):  # type: ignore[no-untyped-def]
    """Write the drafts of a batch; return the number of their tokens."""
    at = 0
    for index in range(len(batch.rows)):
        row = batch.rows[index]
        drafted.offsets[index] = at
        for node in range(1, tables.state[row, NODES]):
            drafted.tokens[at] = np.uint32(tables.nodes[row, node, TOKEN])
            drafted.parents[at] = tables.nodes[row, node, PARENT] - 1
            drafted.accept_prob[at] = tables.probs[row, node, PROB]
            drafted.sources[at] = tables.nodes[row, node, SOURCE]
            at += 1
    drafted.offsets[len(batch.rows)] = at
    return at


_BATCH = (Longs, *[Tokens] * 5)
_DRAFTED = (TokensOut, Ints, FloatsOut, Bytes, TokensOut)


@kernel(Longs, Longs, Longs, LongRows, *_BATCH, *_DRAFTED, Float, returns=types.UniTuple(Int, 2))
def step(  # type: ignore[no-untyped-def]
    frame, view, live, library_tiers, rows, tokens, offsets, verified, limits, steps,
    drafted_tokens, parents, drafted_prob, sources, drafted_offsets, least,
):  # fmt: skip
    """Commit the tokens of each sequence of a batch, and draft for it.

    frame: `StepFrame.addresses`. view: `View.addresses`. live: `LiveTier.addresses`. library_tiers: int64
    [n, TIER_COLUMNS], tiers of the views of libraries. rows: int64 [B], the sequences' rows in the tables. tokens,
    offsets, verified, limits and steps: fields of `Progress`, limits is `max_draft`; steps is empty if all elements are
    1. The next five arrays are those of a `DraftBatch`, and are written; tuples would take twice as long to pass.
    least: minimum path probability of a draft token; 0: the token budget decides.
    Returns the result, and the index of a sequence that needs room; for DONE, the number of draft tokens.
    """
    batch = CommittedBatch(rows, tokens, offsets, verified, limits, steps)
    drafted = DraftedArrays(drafted_tokens, parents, drafted_prob, sources, drafted_offsets)
    arrays = open_frame(frame)
    tables = arrays.tables
    depth, max_draft = frame[MATCH_DEPTH], tables.probs.shape[1] - 1
    problem, at = check(tables.state, batch, max_draft)
    if problem != DONE:
        return problem, at
    of_finished, places, tags = open_view(view)
    running = open_live(live)
    ring = RingView(places[RING_TEXT], places[RING_OLDEST], places[RING_HEAD], places[RING_SLOTS])
    commit_all(arrays, batch, ring, depth)
    library_spans = np.empty((len(library_tiers), SPAN_COLUMNS), np.int64)
    tiers = np.empty((len(of_finished) + 1, TIER_COLUMNS), np.int64)
    tiers[:-1] = of_finished
    spans, contexts = spans_and_contexts(tables.state, batch, tiers)
    # Nothing may raise while the live tier is read.
    read = enter(running, tiers[-1])
    place_all(tiers, spans, contexts, depth)
    threshold = np.float32(least) if least > 0 else least_path_prob(arrays.budget, max_draft * len(rows))
    count = 0
    for index in range(len(rows)):
        sequence, limit = tables.state[rows[index]], min(np.int64(limits[index]), max_draft)
        if limit == 0 or sequence[SIZE] == 0:
            continue
        growing = _growing(tables, rows[index])
        owner, tag = sequence[OWNER], sequence[TAG]
        shared = SearchedText(tiers, spans[index], len(tiers) - 1, running.owners, owner, tag, tags, running.tags)
        libraries = _searched_alone(library_tiers, library_spans, shared)
        limits_here = GrowthLimits(threshold, limit, frame[IS_TREE] != 0)
        sequence[NODES] = draft(arrays, growing, sequence, shared, libraries, ring, depth, limits_here)
        count += sequence[NODES] - 1
    leave(running, read)
    if least == 0 and not is_line(arrays.budget):
        select_all(arrays, batch, count)
    return DONE, write_drafts(tables, batch, drafted)
