"""How likely tokens are accepted that a step verifies for a sequence whose text is not known yet.

Each place behind the text holds a token of the prepared draft if that fits, and if nothing is left of it perhaps one
that is looked up. So what a place is likely to gain is how often prepared drafts fit, times the odds of the token; and
how often one that is looked up is accepted there. Both are counted while steps run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssd.types import ROOT, DraftBatch, offsets_of

MEMORY = 0.98
"""What is left of a step's outcome after the next: about fifty steps count."""
FIRST, EACH = 0.3, 0.7
"""On recorded traffic three of ten sequences of a step gain by a first token that is looked up, and each further one is
accepted as often as seven of ten before it: what is believed until more is known, as much as one sequence says.
"""


class Columns:
    """Counts of what became of drafts, by their places."""

    def __init__(self, most: int) -> None:
        """most: draft tokens of a sequence in a step."""
        self._believed = FIRST * EACH ** np.arange(most)
        self._found, self._spared = self._believed.copy(), np.ones(most)
        """Looked-up tokens that were accepted, and sequences that could have had one; float64 [most]."""
        self._fitted = self._prepared = 1.0
        """Prepared drafts of which something was left, and all of them."""

    def drafts(self, odds: Sequence[np.ndarray], room: Sequence[int]) -> DraftBatch:
        """Places as draft tokens that cost and gain as much, for B sequences; their tokens and sources say nothing.

        odds: float32 [n] each, of what is prepared, if all of the draft before it is accepted. room: most tokens.
        """
        sizes, place = np.array(room), np.arange(len(self._found))
        prepared = np.zeros((len(sizes), len(place)))
        for row, path in zip(prepared, odds, strict=True):
            row[: len(path)] = path
        found = np.minimum.accumulate(self._found / self._spared)
        gains = np.minimum(found + self._fitted / self._prepared * np.cumprod(prepared, axis=1), 1.0)
        gains[:, 1:] /= gains[:, :-1].copy()
        exists = place < sizes[:, None]
        tokens = np.zeros(int(sizes.sum()), np.uint32)
        parents = np.broadcast_to(place + ROOT, exists.shape)[exists].astype(np.int32)
        return DraftBatch(tokens, parents, gains[exists].astype(np.float32), tokens.astype(np.uint8), offsets_of(sizes))

    def note(self, prepared: Sequence[bool], spare: Sequence[int], found: Sequence[bool], kept: Sequence[int]) -> None:
        """What became of some sequences in a step: whether they had a draft prepared, how many tokens could be looked
        up, whether such were verified, and how many draft tokens were accepted, -1 if none was verified.
        """
        if not prepared:
            return
        is_found, accepted = np.array(found, np.bool_), np.array(kept)
        place = np.arange(len(self._found))
        has_spare = place < np.array(spare)[:, None]
        self._found = self._faded(self._found, self._believed)
        self._spared = self._faded(self._spared, np.ones_like(self._spared))
        self._found += np.count_nonzero(has_spare & is_found[:, None] & (place < accepted[:, None]), axis=0)
        self._spared += np.count_nonzero(has_spare, axis=0)
        has_draft = np.array(prepared, np.bool_)
        self._fitted = 1 + MEMORY * (self._fitted - 1) + np.count_nonzero(has_draft & ~is_found & (accepted >= 0))
        self._prepared = 1 + MEMORY * (self._prepared - 1) + np.count_nonzero(has_draft)

    @staticmethod
    def _faded(counts: np.ndarray, least: np.ndarray) -> np.ndarray:
        return least + MEMORY * (counts - least)
