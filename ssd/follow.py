"""What is left of drafts behind tokens that were committed since they were made."""

from __future__ import annotations

import numpy as np
from numba import types

from ssd.kernels.jit import FloatsOut, Int, Longs, Tokens, TokensOut, kernel
from ssd.types import ROOT, DraftBatch

Parents = types.Array(types.int32, 1, "C", readonly=True)
ParentsOut = types.Array(types.int32, 1, "C")
LearnedTables = types.Array(types.float32, 1, "C", readonly=True)
Sources = types.Array(types.uint8, 1, "C", readonly=True)
SourcesOut = types.Array(types.uint8, 1, "C")

NONE = -1
"""In place of a draft's index: there is none."""
GONE = -2
"""In place of a node's: it is not behind the tokens."""


def follow(drafts: DraftBatch, picks: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> DraftBatch:
    """What of some drafts follows committed tokens, as drafts for B sequences.

    picks: int64 [B], which of `drafts` each sequence has, `NONE` for none. tokens: uint32 [T], committed since those
    were made; sequence i committed `tokens[offsets[i]:offsets[i + 1]]`, offsets uint32 [B + 1]. A draft that does not
    begin with its sequence's tokens is empty behind them; of a tree the part below the last of them is left. Odds stay
    as they are, since they are given the parent.
    """
    room = int((drafts.offsets[1:] - drafts.offsets[:-1])[picks[picks >= 0]].sum())
    left = DraftBatch(
        tokens=np.empty(room, np.uint32),
        parents=np.empty(room, np.int32),
        accept_prob=np.empty(room, np.float32),
        source=np.empty(room, np.uint8),
        offsets=np.empty(len(picks) + 1, np.uint32),
    )
    arrays, results = _arrays_of(drafts), _arrays_of(left)
    size = _follow(arrays, picks, tokens, offsets, results, np.empty(int(drafts.offsets[-1]), np.int64))
    return DraftBatch(
        left.tokens[:size], left.parents[:size], left.accept_prob[:size], left.source[:size], left.offsets
    )


def count_shared(drafts: DraftBatch, picks: np.ndarray, others: DraftBatch, other_picks: np.ndarray) -> np.ndarray:
    """How many leading tokens some of `drafts` share with some others, int64 [B].

    picks, other_picks: int64 [B], which of them; with `NONE` nothing is shared.
    """
    shared = np.empty(len(picks), np.int64)
    _count_shared(drafts.tokens, drafts.offsets, picks, others.tokens, others.offsets, other_picks, shared)
    return shared


def _arrays_of(drafts: DraftBatch) -> tuple[np.ndarray, ...]:
    return drafts.tokens, drafts.parents, drafts.accept_prob, drafts.source, drafts.offsets


_Drafts = types.Tuple([Tokens, Parents, LearnedTables, Sources, Tokens])
_DraftsOut = types.Tuple([TokensOut, ParentsOut, FloatsOut, SourcesOut, TokensOut])


@kernel(_Drafts, Longs, Tokens, Tokens, _DraftsOut, Longs, returns=Int)
def _follow(drafts, picks, committed, bounds, left, places):  # type: ignore[no-untyped-def]
    """See `follow`; places: int64 [drafted tokens], for its use. Returns how many tokens are left in all."""
    tokens, parents, odds, source, offsets = drafts
    left_tokens, left_parents, left_odds, left_source, left_offsets = left
    size = 0
    for index in range(len(picks)):
        left_offsets[index] = size
        if picks[index] < 0:
            continue
        first, end = np.int64(offsets[picks[index]]), np.int64(offsets[picks[index] + 1])
        at = ROOT
        is_on_path = True
        for position in range(np.int64(bounds[index]), np.int64(bounds[index + 1])):
            node = at + 1
            # Children come behind their parents.
            while first + node < end and (parents[first + node] != at or tokens[first + node] != committed[position]):
                node += 1
            if first + node == end:
                is_on_path = False
                break
            at = node
        if not is_on_path:
            continue
        began = size
        for node in range(at + 1, end - first):
            parent = np.int64(parents[first + node])
            place = ROOT if parent == at else GONE if parent < at else places[first + parent]
            places[first + node] = GONE if place == GONE else size - began
            if place != GONE:
                left_tokens[size], left_odds[size] = tokens[first + node], odds[first + node]
                left_parents[size], left_source[size] = place, source[first + node]
                size += 1
    left_offsets[len(picks)] = size
    return size


@kernel(Tokens, Tokens, Longs, Tokens, Tokens, Longs, Longs, returns=types.none)
def _count_shared(tokens, offsets, picks, others, bounds, other_picks, shared):  # type: ignore[no-untyped-def]
    """See `count_shared`."""
    for index in range(len(picks)):
        shared[index] = 0
        if picks[index] < 0 or other_picks[index] < 0:
            continue
        first, other = np.int64(offsets[picks[index]]), np.int64(bounds[other_picks[index]])
        most = min(np.int64(offsets[picks[index] + 1]) - first, np.int64(bounds[other_picks[index] + 1]) - other)
        count = 0
        while count < most and tokens[first + count] == others[other + count]:
            count += 1
        shared[index] = count
