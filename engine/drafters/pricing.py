"""Decide whether a step of combined drafters runs their networks, and how deep a network drafts.

A forward pass takes place if the tokens that it is expected to add, for the batch as a whole, are more than the engine
produces in its time. What a further position adds follows from recent acceptance. What networks add to the drafts of
other drafters is predicted from what these offer: the better that is, the less a network adds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.scheduling.plan import StepPlan
from ssd.budget.backoff import MAX_LOSS
from ssd.budget.token_budget import StepPrice

PASS_DECAY, STEP_DECAY = 0.9, 0.8
"""Decay of mean durations, per forward pass of a network and per step with networks."""
RETRY_DECAY = 0.98
"""Decay of the mean duration per pass that is not worthwhile, so that a mean of disturbed passes is corrected."""
RATE_DECAY = 0.99
"""Decay per step of the mean acceptance rate: an effective window of about 100 steps."""
EDGES = np.array([0.1, 0.3, 0.6, 1.0, 1.5, 2.5, 4.0])
"""Upper bounds of the intervals of expected tokens within which gains are averaged."""
FIRST_GAIN = 2.0
"""Gain in tokens that is assumed before any was observed; it counts as one observation."""
GAIN_RATE = 0.05
"""Smallest weight of an observed sequence in the mean gains."""
MIN_SKIPPED, MAX_SKIPPED = 32, 2048
"""Smallest and largest number of consecutive steps without networks, after which they run to measure their gain again.
Between these limits, the number is such that the measurement takes `MAX_LOSS` of the time."""


class DepthPrice(NamedTuple):
    """Rule that says which positions of a draft are worth a forward pass."""

    acceptance: float
    """Recent rate of acceptance, the factor from a token's path probability to that of its child."""
    least: float
    """Smallest path probability of a token to draft."""
    worthwhile: float
    """Expected number of tokens above which a further position is drafted; negative: always."""

    def is_worthwhile(self, path_prob: np.ndarray) -> bool:
        """Return whether drafting after nodes of these path probabilities, float [n], is worth a forward pass."""
        # A child whose path probability is below the minimum is not verified.
        gain = np.maximum(0.0, path_prob * self.acceptance - self.least).sum()
        return self.worthwhile < 0 or bool(gain > self.worthwhile)


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
            self._next_s = _decayed(self._next_s, seconds, PASS_DECAY)
        self._has_run = True

    def record_acceptance(self, reached: int, accepted: int) -> None:
        """Record the depth of the deepest token whose parent was accepted, and the number of accepted tokens."""
        self._tried = RATE_DECAY * self._tried + reached
        self._accepted = RATE_DECAY * self._accepted + (accepted if reached else 0)

    def record_stop(self) -> None:
        """Record that a further pass was not worthwhile."""
        self._next_s *= RETRY_DECAY

    def price(self, step: StepPrice | None) -> DepthPrice:
        """Return the price of positions in a step; None: all positions are drafted."""
        if step is None:
            return DepthPrice(1.0, 0.0, -1.0)
        acceptance = self._accepted / self._tried
        return DepthPrice(acceptance, step.min_path_prob, step.tokens_per_second * self._next_s)


class SkipRule:
    """Learns the gain and the time of the networks among combined drafters."""

    def __init__(self) -> None:
        self.skipped = 0
        """Number of steps in which the networks were skipped."""
        self._gains = np.full(len(EDGES) + 1, FIRST_GAIN)
        self._observed = np.ones(len(EDGES) + 1)
        self._model_s = 0.0
        self._since_run = 0

    def should_run_networks(self, plan: StepPlan, expected: np.ndarray) -> bool:
        """Return whether to run the networks in a step.

        expected: float [B], expected number of accepted tokens of each sequence without them.
        """
        if plan.price is None or not self._model_s:
            return True
        # One token of each sequence takes about as long as a step.
        step_s = len(expected) / plan.price.tokens_per_second
        if self._since_run >= min(max(MIN_SKIPPED, self._model_s / (MAX_LOSS * step_s)), MAX_SKIPPED):
            return True
        gain = float(self._gains[np.searchsorted(EDGES, expected)].sum())
        if plan.price.is_worthwhile(gain, self._model_s):
            return True
        self.skipped += 1
        self._since_run += 1
        return False

    def learn(self, before: np.ndarray, after: np.ndarray, seconds: float) -> None:
        """Record a step with networks.

        before, after: float [B], expected number of accepted tokens of each sequence without and with their drafts.
        seconds: time of these, and of what follows from them.
        """
        self._since_run = 0
        self._model_s = _decayed(self._model_s, seconds, STEP_DECAY)
        for place, gain in zip(np.searchsorted(EDGES, before).tolist(), (after - before).tolist(), strict=True):
            self._observed[place] += 1
            self._gains[place] += max(GAIN_RATE, 1 / self._observed[place]) * (gain - self._gains[place])


def _decayed(mean: float, seconds: float, decay: float) -> float:
    """Return a mean with another duration; it begins with the first one."""
    return decay * mean + (1 - decay) * seconds if mean else seconds
