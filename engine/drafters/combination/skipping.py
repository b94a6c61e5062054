"""Decide whether a step of combined drafters runs their networks.

The tokens that a network's drafts add are predicted from what the other drafters offer: the better that is, the less a
network adds. A forward pass is skipped if the tokens that it is expected to add, for the batch as a whole, are fewer
than the engine produces in its time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import numpy as np

from engine.scheduling.plan import StepPlan
from ssd.budget.backoff import MAX_LOSS

EDGES = np.array([0.1, 0.3, 0.6, 1.0, 1.5, 2.5, 4.0])
"""Upper bounds of the intervals of expected tokens within which gains are averaged."""
FIRST_GAIN = 2.0
"""Gain in tokens that is assumed before any was observed; it counts as one observation."""
RATE = 0.05
"""Smallest weight of an observed sequence in the mean gains."""
TIME_DECAY = 0.8
"""Decay per step of the mean time of the networks."""
MIN_SKIPPED, MAX_SKIPPED = 32, 2048
"""Smallest and largest number of consecutive steps without networks, after which they run to measure their gain again.
Between these limits, the number is such that the measurement takes `MAX_LOSS` of the time."""


class SkipRule:
    """Learns the gain and the time of the networks."""

    def __init__(self) -> None:
        self.skipped = 0
        """Number of steps in which the networks were skipped."""
        self._gains = np.full(len(EDGES) + 1, FIRST_GAIN)
        self._observed = np.ones(len(EDGES) + 1)
        self._model_s = 0.0
        self._step_model_s = 0.0
        self._since_run = 0
        self._expected = np.empty(0)

    def should_run_networks(self, plan: StepPlan, expected: np.ndarray) -> bool:
        """Return whether to run the networks in a step.

        expected: float [B], expected number of accepted tokens of each sequence without them.
        """
        self._expected = expected
        self._step_model_s = 0.0
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

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the time of the networks' drafts, and of what follows from them."""
        began = perf_counter()
        yield
        self._step_model_s += perf_counter() - began

    def learn(self, expected: np.ndarray) -> None:
        """Record a step with networks; expected: float [B], as for `should_run_networks` but with all drafts."""
        self._since_run = 0
        seconds = self._step_model_s
        self._model_s = TIME_DECAY * self._model_s + (1 - TIME_DECAY) * seconds if self._model_s else seconds
        gains = expected - self._expected
        for place, gain in zip(np.searchsorted(EDGES, self._expected).tolist(), gains.tolist(), strict=True):
            self._observed[place] += 1
            self._gains[place] += max(RATE, 1 / self._observed[place]) * (gain - self._gains[place])
