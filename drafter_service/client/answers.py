"""What of an answer can be used: nothing that a service sends may hurt the engine."""

from __future__ import annotations

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


def read_answer(message: pb.Drafts, limits: np.ndarray, vocabulary_size: int) -> tuple[DraftBatch, int]:
    """Drafts of at most `limits` tokens, uint32 [B], with ids below `vocabulary_size` unless that is 0.

    Returns the drafts, and how many of them were removed as malformed. Raises WireError for arrays that do not fit
    together.
    """
    paths = _read_good_paths(message, limits, vocabulary_size)
    if paths is not None:
        return paths, 0
    return _sift(read_drafts(message, len(limits)), limits.astype(np.int64), vocabulary_size)


def _read_good_paths(message: pb.Drafts, limits: np.ndarray, vocabulary_size: int) -> DraftBatch | None:
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
    return DraftBatch(tokens, parents, odds, source, offsets)


def _sift(drafts: DraftBatch, limits: np.ndarray, vocabulary_size: int) -> tuple[DraftBatch, int]:
    """The well-formed drafts, and how many were removed."""
    offsets = drafts.offsets.astype(np.int64)
    sizes = offsets[1:] - offsets[:-1]
    place = spread(np.zeros(len(sizes), np.int64), offsets)
    is_fit = (drafts.accept_prob >= 0) & (drafts.accept_prob <= 1) & (drafts.parents >= ROOT) & (drafts.parents < place)
    if vocabulary_size:
        is_fit &= drafts.tokens < vocabulary_size
    is_good = _all_of(is_fit, offsets) & (sizes <= limits)
    keep, sizes = is_good.repeat(sizes), sizes * is_good
    good = DraftBatch(
        drafts.tokens[keep], drafts.parents[keep], drafts.accept_prob[keep], drafts.source[keep], offsets_of(sizes)
    )
    return good, len(sizes) - int(np.count_nonzero(is_good))


def _all_of(marks: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """For each run of `marks` whether all are set."""
    before = np.concatenate(([0], np.cumsum(~marks)))
    same: np.ndarray = before[offsets[1:]] == before[offsets[:-1]]
    return same
