"""Decide in which steps of the graph executor the device drafts.

A step that drafts gains the time that plain steps would have taken for the tokens that it committed, less its own time.
The sum of gains is limited, so that drafting stops soon after it is no longer worthwhile. While it is stopped, a small
fraction of the time is added to the sum, until it suffices to try again. Drafting therefore takes at most that fraction
of the time, whatever the drafter costs.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from engine.scheduling.plan import StepPlan
from engine.speculation.step_cost import Cost

MAX_LOSS = 0.02
"""Largest fraction of the time that drafting takes in the long run while it is not worthwhile."""
PROBE = 4.0
"""Loss, in durations of plain steps, at which drafting is stopped again if it does not gain."""
MAX_GAIN = 20.0
"""Largest sum of gains, in durations of plain steps: the loss after which drafting stops if it no longer gains."""
MAX_DEBT = 200.0
"""Largest negative sum, in durations of plain steps, so that one very slow step does not stop drafting for long."""
MAX_DEVIATION = 2.0
"""Largest duration of a step that drafts, as a multiple of the median of recent ones; longer ones were disturbed."""
CATCH_UP_STEPS = 2
"""Number of first steps that draft whose whole duration counts: slots that plain steps left are written in them."""
PLAIN_STEPS = 8
"""Smallest number of consecutive plain steps, from which their duration is known."""
DRAFTING_STEPS = 256
"""Largest number of consecutive steps that draft, after which the duration of plain steps is measured again."""


class DeviceBudget:
    """Stops drafting on the device while it is not worthwhile."""

    def __init__(self, cost: Cost) -> None:
        """cost: measured cost of plain steps."""
        self._cost = cost
        self._measured: dict[int, float] = {}
        """Measured seconds of a plain step by number of sequences."""
        self._plain = deque([1.0], maxlen=2 * PLAIN_STEPS - 1)
        """Durations of the last plain steps, as multiples of the measured ones."""
        self._drafting = deque[float](maxlen=2 * PLAIN_STEPS - 1)
        """Durations of the last steps that drafted, as multiples of the measured ones of plain steps."""
        self._sum = PROBE
        """Sum of gains, in durations of plain steps."""
        self._run = PROBE
        """Sum of gains since drafting last started, without the first steps, which catch up with committed tokens."""
        self._is_stopped = True
        self._steps = 0
        """Number of consecutive steps of the current kind."""

    @property
    def is_backing_off(self) -> bool:
        """Whether the next step does not draft."""
        return self._is_stopped

    def record(self, committed: StepPlan, launched: StepPlan, tokens: int, seconds: float) -> None:
        """Learn from the time in which one step was launched and another or the same one was committed.

        tokens: number of tokens that it committed. Steps with prompts are not counted.
        """
        plans = (committed, launched)
        sequences = len(committed.producing)
        if any(entry.scheduled > 1 or not entry.produces for plan in plans for entry in plan.entries):
            return
        if sequences not in self._measured:
            self._measured[sequences] = float(self._cost.seconds(sequences, sequences))
        duration = seconds / self._measured[sequences]
        if any(plan.is_drafting for plan in plans):
            self._record_draft(duration, tokens / sequences)
        else:
            self._record_plain(duration)

    def _record_draft(self, duration: float, tokens: float) -> None:
        """Record a step that drafted; tokens: number of committed tokens per sequence."""
        self._drafting.append(duration)
        if self._steps >= CATCH_UP_STEPS:
            duration = min(duration, MAX_DEVIATION * median(self._drafting))
        gain = tokens - duration / median(self._plain)
        self._sum = min(max(self._sum + gain, -MAX_DEBT), MAX_GAIN)
        if self._steps >= CATCH_UP_STEPS:
            self._run = min(self._run + gain, MAX_GAIN)
        self._steps += 1
        if max(self._sum, self._run) < 0 or self._steps >= DRAFTING_STEPS:
            self._is_stopped, self._steps = True, 0

    def _record_plain(self, duration: float) -> None:
        self._plain.append(duration)
        if not self._is_stopped:  # no request wanted drafts
            return
        self._sum = max(self._sum, min(self._sum + MAX_LOSS, PROBE))
        self._steps += 1
        if self._steps >= PLAIN_STEPS and self._sum >= PROBE:
            self._is_stopped, self._steps, self._run = False, 0, PROBE
