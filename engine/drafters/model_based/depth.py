"""Decide how deep a network drafts, from the duration of its forward passes and from recent acceptance."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ssd.budget.token_budget import StepPrice

TIME_DECAY = 0.9
"""Decay per forward pass of its mean duration."""
RETRY_DECAY = 0.98
"""Decay of this mean per pass that is not worthwhile, so that a mean of disturbed passes is corrected."""
RATE_DECAY = 0.99
"""Decay per step of the mean acceptance rate: an effective window of about 100 steps."""


class DepthPrice(NamedTuple):
    """Which positions of a draft are worth a forward pass."""

    acceptance: float
    """Recent rate of acceptance, the factor from a token's path probability to that of its child."""
    least: float
    """Smallest path probability of a token to draft."""
    worthwhile: float
    """Expected number of tokens above which a further position is drafted; negative: always."""


class DraftDepth:
    """Durations of forward passes and acceptance, from which the depth of drafts is chosen."""

    def __init__(self) -> None:
        self._next_s = 0.0
        """Mean duration of a pass after the first."""
        self._has_run = False
        """Whether there was such a pass; the first one allocates and does not count."""
        self._tried = self._accepted = 1.0

    def record_forward(self, seconds: float) -> None:
        """Record the duration of a pass after the first of a draft."""
        if self._has_run:
            self._next_s = TIME_DECAY * self._next_s + (1 - TIME_DECAY) * seconds if self._next_s else seconds
        self._has_run = True

    def record_acceptance(self, reached: int, accepted: int) -> None:
        """Record the depth of the deepest token whose parent was accepted, and the number of accepted tokens."""
        self._tried = RATE_DECAY * self._tried + reached
        self._accepted = RATE_DECAY * self._accepted + (accepted if reached else 0)

    def price(self, step: StepPrice | None) -> DepthPrice:
        """Return the price of positions in a step; None: all positions are drafted."""
        if step is None:
            return DepthPrice(1.0, 0.0, -1.0)
        acceptance = self._accepted / self._tried
        return DepthPrice(acceptance, step.min_path_prob, step.tokens_per_second * self._next_s)

    def record_stop(self) -> None:
        """Record that a further pass was not worthwhile."""
        self._next_s *= RETRY_DECAY

    def should_draft_deeper(self, price: StepPrice, path_prob: np.ndarray) -> bool:
        """Return whether drafting after nodes of these path probabilities, float [n], is worth a forward pass."""
        children = path_prob * self._accepted / self._tried
        # A child whose path probability is below the minimum is not verified.
        gain = np.maximum(0.0, children - price.min_path_prob).sum()
        if price.is_worthwhile(float(gain), self._next_s):
            return True
        self.record_stop()
        return False
