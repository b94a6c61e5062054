"""Choose the depth to which sampled drafts are verified, in rejection mode.

Outputs follow the target's distribution only if the decision to verify a sampled token does not depend on that token.
The token budget therefore does not get the drafter's `accept_prob` of such tokens, but a path whose probabilities are
the acceptance rates by depth of earlier steps. It selects a depth, and all tokens up to that depth are verified.
"""

from __future__ import annotations

import numpy as np

from engine.drafters.drafts import Drafts
from engine.speculation.draft_tree import depths_of
from ssd.types import DraftBatch, Path

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

    def record(self, verified: int, accepted: int) -> None:
        """Count the tokens of a draft by depth: those that could have been accepted, and those that were."""
        depth = np.arange(1, len(self._tried) + 1)
        reached = depth <= min(verified, accepted + 1)
        self._tried = DECAY * self._tried + (1 - DECAY) + reached
        self._accepted = DECAY * self._accepted + (1 - DECAY) * PRIOR_RATE + (reached & (depth <= accepted))


def hide_sampled(drafts: Drafts, is_sampled: np.ndarray, rooms: np.ndarray, rates: DepthRates) -> DraftBatch:
    """Return the drafts for the token budget, with sampled ones, bool [B], replaced by paths of acceptance rates.

    rooms: int64 [B], largest number of tokens of each draft.
    """
    batch = drafts.batch
    parts = [rates.path(room) if hidden else batch.take([at]) for at, (hidden, room) in enumerate(
        zip(is_sampled.tolist(), rooms.tolist(), strict=True)
    )]  # fmt: skip
    depths = depths_of(batch.parents, batch.offsets)[is_sampled[drafts.owner]]
    rates.deepest = max(rates.deepest, int(depths.max(initial=0)))
    return DraftBatch.concatenate(parts)
