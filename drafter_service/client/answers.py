"""What of an answer can be used: nothing that a service sends may hurt the engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drafter_service.client.texts import spread
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.wire import read_drafts
from ssd.draft import ROOT, DraftBatch, offsets_of

ONE_AS_BITS = np.float32(1.0).view(np.uint32)
"""Read as a whole number, a float from 0 to 1 is at most this; a negative one, a greater one or no number is more."""


NOTHING = np.zeros(0, bool)


@dataclass(frozen=True, eq=False)
class Answer:
    """Drafts for B sequences, all of them fit for use."""

    drafts: DraftBatch
    is_path: np.ndarray
    """bool [B]: each token of the draft follows the one before it."""
    is_trimmed: bool
    """Whether a draft has more tokens than its limit."""
    malformed: int
    """Drafts that were taken out."""


def read_answer(message: pb.Drafts, limits: np.ndarray, ahead: int, vocabulary_size: int) -> Answer:
    """Drafts of at most `limits`, int64 [B], paths of `ahead` more; token ids below `vocabulary_size` unless that is 0.

    Raises WireError for arrays that do not fit together.
    """
    drafts = read_drafts(message, len(limits))
    offsets = drafts.offsets.astype(np.int64)
    sizes = offsets[1:] - offsets[:-1]
    follows = drafts.parents == spread(np.full(len(sizes), ROOT), offsets)
    odds = drafts.odds.view(np.uint32)
    over = sizes - limits
    foreign = drafts.tokens >= vocabulary_size if vocabulary_size else NOTHING
    oddities = (~follows, odds > ONE_AS_BITS, over > ahead, foreign)
    if not any(map(np.count_nonzero, oddities)):
        return Answer(drafts, np.ones(len(sizes), bool), int(np.count_nonzero(over > 0)) > 0, 0)
    is_path = _all_of(follows, offsets)
    place = spread(np.zeros(len(sizes), np.int64), offsets)
    is_fit = (odds <= ONE_AS_BITS) & (drafts.parents >= ROOT) & (drafts.parents < place)
    if vocabulary_size:
        is_fit &= drafts.tokens < vocabulary_size
    is_good = _all_of(is_fit, offsets) & (over <= np.where(is_path, ahead, 0))
    malformed = len(sizes) - int(np.count_nonzero(is_good))
    return Answer(_only(drafts, is_good, sizes), is_path, bool((over[is_good] > 0).any()), malformed)


def _all_of(marks: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """For each run of `marks` whether all are set."""
    before = np.concatenate(([0], np.cumsum(~marks)))
    same: np.ndarray = before[offsets[1:]] == before[offsets[:-1]]
    return same


def _only(drafts: DraftBatch, is_good: np.ndarray, sizes: np.ndarray) -> DraftBatch:
    keep = np.repeat(is_good, sizes)
    return DraftBatch(
        drafts.tokens[keep],
        drafts.parents[keep],
        drafts.odds[keep],
        drafts.source[keep],
        offsets_of(sizes * is_good),
    )
