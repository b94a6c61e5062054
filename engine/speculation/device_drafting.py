"""Decide in which steps of the graph executor the device drafts.

The time of drafting is part of the step, so it is known only as the difference to steps without drafts.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from engine.scheduling.plan import StepPlan
from ssd.budget.backoff import Backoff
from ssd.budget.curve import StepCurve

MAX_DEVIATION = 2.0
"""Limit of the duration of a step that drafts, as a multiple of the median of recent ones: longer steps were
disturbed."""
CATCH_UP_STEPS = 2
"""Number of steps after drafting begins whose durations are not limited. They take longer, because they write the slots
of the drafter that plain steps left out."""
PLAIN_STEPS = 8
"""Smallest number of consecutive plain steps, from which their duration is known."""
TRIAL = 4.0
"""What a trial of drafting may cost, in durations of a plain step; a step that drafts costs a large part of one."""
DRAFTING_RUNS = 256, 256
"""Number of consecutive steps that draft, after which the duration of plain steps is measured again."""


class DeviceDrafting:
    """Stops drafting on the device while it is not worthwhile."""

    def __init__(self, curve: StepCurve) -> None:
        """curve: durations of plain steps."""
        self._curve = curve
        self._backoff = Backoff(TRIAL, shortest_pause=PLAIN_STEPS, runs=DRAFTING_RUNS, is_stopped=True)
        self._plain = deque([1.0], maxlen=2 * PLAIN_STEPS - 1)
        """Durations of the last plain steps, as multiples of those of the curve."""
        self._drafting = deque[float](maxlen=2 * PLAIN_STEPS - 1)
        """Durations of the last steps that drafted, as multiples of those of plain steps of the curve."""

    @property
    def is_backing_off(self) -> bool:
        """Whether the next step does not draft."""
        return self._backoff.is_stopped

    def record(self, committed: StepPlan, launched: StepPlan, tokens: int, seconds: float) -> None:
        """Learn from the time between two commits, in which one step was committed and the same or a later one
        launched.

        tokens: number of tokens of the committed step. Steps with prompts are not counted.
        """
        plans, sequences = (committed, launched), committed.producers
        if any(plan.scheduled_tokens > plan.producers for plan in plans):
            return
        duration = seconds / float(self._curve.seconds(sequences, sequences))
        if any(plan.is_drafting for plan in plans):
            is_beginning = self._backoff.steps < CATCH_UP_STEPS
            self._drafting.append(duration)
            if not is_beginning:
                duration = min(duration, MAX_DEVIATION * median(self._drafting))
            saved = tokens / sequences - duration / median(self._plain)
            self._backoff.record_drafts(saved, is_beginning=is_beginning)
            return
        self._plain.append(duration)
        if self._backoff.is_stopped:  # Otherwise no request wanted drafts.
            self._backoff.record_pause()
