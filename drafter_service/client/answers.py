"""What of an answer can be used: nothing that a service sends may hurt the engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drafter_service.client.texts import spread
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import read_drafts
from ssd.types import ROOT, DraftBatch, offsets_of

U4, I4, F4, U1 = (np.dtype(name) for name in ("<u4", "<i4", "<f4", "<u1"))

ONE_AS_BITS = np.float32(1.0).view(np.uint32)
"""Read as a whole number, a float from 0 to 1 is at most this; a negative one, a greater one or no number is more."""

MOST_TOKENS = np.uint32(0xFFFF_FFFF)
"""The first id that no token can have."""


@dataclass(frozen=True, eq=False)
class Answer:
    """Drafts for B sequences, all of them fit for use."""

    drafts: DraftBatch
    sizes: np.ndarray
    """Whole numbers [B]: tokens of each."""
    is_path: np.ndarray | bool
    """bool [B], or for all: each token of the draft follows the one before it."""
    malformed: int = 0
    """Drafts that were taken out."""


def read_answer(message: pb.Drafts, limits: np.ndarray, ahead: int, vocabulary_size: int) -> Answer:
    """Drafts of at most `limits`, uint32 [B], and paths of `ahead` more; ids below `vocabulary_size` unless that is 0.

    Raises WireError for arrays that do not fit together.
    """
    return _read_good_paths(message, limits + np.uint32(ahead), vocabulary_size) or _sift(
        read_drafts(message, len(limits)), limits.astype(np.int64), ahead, vocabulary_size
    )


def _read_good_paths(message: pb.Drafts, limits: np.ndarray, vocabulary_size: int) -> Answer | None:
    """The answer if it is nothing but paths without a fault, as nearly all are; takes a third of the time."""
    try:
        tokens, odds = np.frombuffer(message.tokens, U4), np.frombuffer(message.odds, F4)
        parents, source = np.frombuffer(message.parents, I4), np.frombuffer(message.source, U1)
        offsets = np.frombuffer(message.offsets, U4)
    except ValueError:
        return None
    count = len(tokens)
    if not count == len(odds) == len(parents) == len(source) or len(offsets) != len(limits) + 1:
        return None
    if offsets[0] != 0 or offsets[-1] != count:
        return None
    sizes = offsets[1:] - offsets[:-1]
    # Where offsets fall a size is negative, which as an unsigned number is beyond any limit.
    if np.count_nonzero(sizes > limits):
        return None
    follows = parents == np.arange(count) - (offsets[:-1] + np.int64(1)).repeat(sizes)
    is_good = follows & (odds.view(np.uint32) <= ONE_AS_BITS) & (tokens < (vocabulary_size or MOST_TOKENS))
    if np.count_nonzero(is_good) < count:
        return None
    return Answer(DraftBatch(tokens, parents, odds, source, offsets), sizes, True)


def _sift(drafts: DraftBatch, limits: np.ndarray, ahead: int, vocabulary_size: int) -> Answer:
    """The drafts that are good."""
    offsets = drafts.offsets.astype(np.int64)
    sizes = offsets[1:] - offsets[:-1]
    place = spread(np.zeros(len(sizes), np.int64), offsets)
    is_path = _all_of(drafts.parents == place - 1, offsets)
    is_fit = (drafts.accept_prob >= 0) & (drafts.accept_prob <= 1) & (drafts.parents >= ROOT) & (drafts.parents < place)
    if vocabulary_size:
        is_fit &= drafts.tokens < vocabulary_size
    is_good = _all_of(is_fit, offsets) & (sizes <= limits + ahead * is_path)
    keep, sizes = is_good.repeat(sizes), sizes * is_good
    good = DraftBatch(
        drafts.tokens[keep], drafts.parents[keep], drafts.accept_prob[keep], drafts.source[keep], offsets_of(sizes)
    )
    return Answer(good, sizes, is_path, len(sizes) - int(np.count_nonzero(is_good)))


def _all_of(marks: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """For each run of `marks` whether all are set."""
    before = np.concatenate(([0], np.cumsum(~marks)))
    same: np.ndarray = before[offsets[1:]] == before[offsets[:-1]]
    return same
