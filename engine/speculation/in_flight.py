"""Choose whether a step is launched before or after the results of the previous one are read.

At depth 1 the next step is launched before: the device never waits for the host, but drafts are made for the predicted
outcome of the step in flight, and fewer draft tokens are accepted. At depth 0 it is launched after: the device waits
for the host between steps. Depth 0 is chosen if the host's part of a step costs less than the loss of accepted tokens.
"""

from __future__ import annotations

LATE_LOSS = 0.45
"""Fraction of accepted tokens that is lost with a step in flight (docs/experiments.md, Drafts for a step in flight)."""
DECAY = 0.95
"""Decay per step of the sums below: an effective window of about 20 steps."""


class InFlightDepth:
    """The number of steps in flight while the next one is planned, 0 or 1, chosen from the times of recent steps."""

    def __init__(self, fixed: int | None = None) -> None:
        """fixed: a depth that does not change; None to choose it from measurements."""
        self._fixed = fixed
        self._host_s = self._step_s = 0.0
        self._accepted = self._produced = 0.0

    @property
    def current(self) -> int:
        """The depth for the next step."""
        if self._fixed is not None:
            return self._fixed
        return int(self._host_s * self._produced >= LATE_LOSS * self._accepted * self._step_s)

    def record(self, host_s: float, step_s: float, accepted: int, produced: int) -> None:
        """Record one step: the host's part of its duration, the duration, draft tokens accepted, tokens produced."""
        self._host_s = DECAY * self._host_s + host_s
        self._step_s = DECAY * self._step_s + step_s
        self._accepted = DECAY * self._accepted + accepted
        self._produced = DECAY * self._produced + produced
