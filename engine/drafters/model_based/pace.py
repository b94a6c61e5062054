"""Decide how deep a network drafts, from the duration of its forward passes and from recent acceptance."""

from __future__ import annotations

import numpy as np

from engine.drafters.draft_pool import DraftPool
from engine.scheduling.plan import StepPlan

TIME_DECAY = 0.9
"""Decay per forward pass of its mean duration."""
RATE_DECAY = 0.99
"""Decay per step of the mean acceptance rate: an effective window of about 100 steps."""


class Pace:
    """Durations of forward passes and acceptance, from which the depth of drafts is chosen."""

    def __init__(self) -> None:
        self._next_s = 0.0
        """Mean duration of a pass after the first."""
        self._spent_s = 0.0
        """Duration of the passes of the current draft."""
        self._tried = self._accepted = 1.0

    def record_forward(self, seconds: float, *, is_first: bool) -> None:
        """Record the duration of one pass."""
        self._spent_s = seconds if is_first else self._spent_s + seconds
        if not is_first:
            self._next_s = TIME_DECAY * self._next_s + (1 - TIME_DECAY) * seconds if self._next_s else seconds

    def record_acceptance(self, reached: int, accepted: int) -> None:
        """Record the depth of the deepest token whose parent was accepted, and the number of accepted tokens."""
        self._tried = RATE_DECAY * self._tried + reached
        self._accepted = RATE_DECAY * self._accepted + (accepted if reached else 0)

    def should_draft_deeper(self, plan: StepPlan, pool: DraftPool, nodes: np.ndarray) -> bool:
        """Return whether expanding `nodes`, indices in the pool, increases the expected number of tokens per second."""
        assert plan.seconds is not None
        path_prob = pool.nodes.path_prob
        gain = float(path_prob[nodes].sum()) * self._accepted / self._tried
        so_far = plan.sequences + float(path_prob.sum())
        # The cost is a fraction of the step's time per sequence.
        token_s = (plan.cost or 0.0) * plan.seconds / plan.sequences
        next_s = (self._next_s or self._spent_s) + len(nodes) * token_s
        spent_s = plan.seconds + self._spent_s + len(pool) * token_s
        return gain / next_s > so_far / spent_s
