"""Choose the depth to which sampled drafts are verified, in rejection mode.

Outputs follow the target's distribution only if the decision to verify a sampled token does not depend on that token.
The token budget therefore does not get the drafter's `accept_prob` of such tokens, but a path whose probabilities are
the acceptance rates by depth of earlier steps. It selects a depth, and all tokens up to that depth are verified.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import pairwise

import numpy as np

from engine.drafters.base import DETERMINISTIC, Drafts
from engine.scheduling.plan import SequencePlan, SequenceResult
from engine.speculation.draft_tree import DraftTree
from ssd.types import DraftBatch, Path, offsets_of

DECAY = 0.99
"""Decay per recorded draft of the counts: an effective window of about 100 drafts."""
PRIOR_RATE = 0.7
"""Prior of the rates, with the weight of one draft."""


class DepthRates:
    """Fraction of accepted draft tokens by depth, given that the parent was accepted."""

    def __init__(self, max_draft: int) -> None:
        self._tried = np.ones(max_draft)
        self._accepted = np.full(max_draft, PRIOR_RATE)
        self.deepest = 0
        """Largest depth of earlier drafts."""

    def path(self, length: int) -> DraftBatch:
        """Return a draft with these rates as `accept_prob`; the tokens are placeholders.

        It has at most `length` tokens, and no more than the deepest of earlier drafts, because the length of the
        present draft may depend on the tokens that were sampled.
        """
        length = min(length, self.deepest)
        rates = (self._accepted / self._tried)[:length]
        return DraftBatch.from_paths([Path(np.zeros(length, np.uint32), rates.astype(np.float32))])

    def record(self, result: SequenceResult) -> None:
        """Count the accepted and rejected tokens of a draft."""
        depth = np.arange(1, len(self._tried) + 1)
        reached = depth <= min(result.max_accepted, result.accepted + 1)
        self._tried = DECAY * self._tried + (1 - DECAY) + reached
        self._accepted = DECAY * self._accepted + (1 - DECAY) * PRIOR_RATE + (reached & (depth <= result.accepted))


def sampled_drafts(drafts: Drafts, entries: SequenceOf[SequencePlan]) -> list[bool]:
    """Return for each entry whether its draft has sampled tokens that rejection verifies."""
    if drafts.q_rows is None:
        return [False] * len(entries)
    bounds = pairwise(drafts.batch.offsets.tolist())
    return [
        entry.sequence.request.sampling.uses_rejection and bool((drafts.q_rows[start:end] != DETERMINISTIC).any())
        for entry, (start, end) in zip(entries, bounds, strict=True)
    ]


def hide_sampled(
    batch: DraftBatch, sampled: SequenceOf[bool], entries: SequenceOf[SequencePlan], rates: DepthRates
) -> DraftBatch:
    """Return the drafts for the token budget, with `sampled` ones replaced by paths of acceptance rates."""
    parts, deepest = [], rates.deepest
    for index, (is_sampled, entry) in enumerate(zip(sampled, entries, strict=True)):
        own = slice(int(batch.offsets[index]), int(batch.offsets[index + 1]))
        if is_sampled:
            parts.append(rates.path(entry.draft_room))
            deepest = max(deepest, int(DraftTree(batch.parents[own]).depths.max()))
            continue
        columns = batch.tokens[own], batch.parents[own], batch.accept_prob[own], batch.source[own]
        parts.append(DraftBatch(*columns, offsets_of(np.array([own.stop - own.start]))))
    rates.deepest = deepest
    return DraftBatch.concatenate(parts)
