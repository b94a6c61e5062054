"""Select the draft tokens that a step verifies, and decide in which steps the drafter is called.

Where the device drafts within a step, the time of drafting is known only as the difference to steps without drafts.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from statistics import mean, median

import numpy as np

from engine.drafters.sources import DraftSource
from engine.scheduling.plan import StepPlan
from ssd.budget.backoff import MEASURED_RUNS, MIN_TRIAL_STEPS, Backoff
from ssd.budget.curve import StepCurve
from ssd.budget.token_budget import StepPrice, TokenBudget
from ssd.kernels.budget import open_budget, select
from ssd.kernels.jit import Float, Floats, FloatsOut, Longs, Nothing, Parents, SourceCodes, Tokens, inline, kernel
from ssd.types import NO_LIMITS, DraftBatch, DraftLimits

LOG = logging.getLogger(__name__)
GRAMMAR = int(DraftSource.GRAMMAR)
DECAY = 0.98
"""Decay per step of the sums that calibrate drafts: an effective window of about 50 steps."""
PRIOR_ACCEPTED = 0.5
"""Prior number of accepted tokens. It keeps the calibration above 0, so that drafts that were never accepted are still
tried at times."""
RECENT = 16
"""Number of last steps with drafts from which the loss of a trial with another number of sequences is expected."""
MAX_DEVIATION = 2.0
"""Limit of the duration of a step that drafts, as a multiple of the median of recent ones: longer steps were
disturbed."""
CATCH_UP_STEPS = 2
"""Number of steps after drafting begins whose durations are not limited. They take longer, because they write the slots
of the drafter that plain steps left out."""
PLAIN_STEPS = 8
"""Smallest number of consecutive plain steps, from which their duration is known."""
DEVICE_TRIAL = 4.0
"""Largest cost of a trial of drafting, in durations of a plain step. One step that drafts costs a large part of it."""
DRAFTING_RUNS = 256, 256
"""Number of consecutive steps that draft, after which the duration of plain steps is measured again."""


class DraftSelection:
    """The token budget of an engine, for drafts of any drafter, whose probabilities it calibrates."""

    def __init__(
        self, curve: StepCurve, limits: DraftLimits = NO_LIMITS, warn: Callable[[str], None] = LOG.warning
    ) -> None:
        """curve: durations of steps, in seconds. limits: of the drafter. warn: called once if drafting cannot pay."""
        self._budget = TokenBudget(curve)
        self._limits = limits
        self._warn: Callable[[str], None] | None = warn
        self._drafting_s, self._gains = deque[float](maxlen=RECENT), deque[float](maxlen=RECENT)
        """Time of drafting in the last steps with drafts, and the number of accepted tokens of each sequence."""
        self._backoffs: dict[tuple[int, bool], Backoff] = {}
        self._expected = self._accepted = 0.0
        """Expected (from path_prob) and actual number of recently accepted draft tokens."""

    def admits(self, plan: StepPlan) -> bool:
        """Return whether a step calls the drafter: its drafts can pay, no pause is in progress, and no trial must wait.

        If that holds only without the drafter's extra rows, removes the room for them from the plan.
        """
        sequences = plan.producers
        self._budget.prepare(sequences, plan.scheduled_tokens - sequences)
        if len(plan.extra_rooms) and (rows := int(plan.extra_rooms.sum())):
            if self._may_draft(plan, rows):
                return True
            plan.extra_rooms = np.zeros_like(plan.extra_rooms)
        return self._may_draft(plan, 0)

    @property
    def calibration(self) -> float:
        """Recent ratio of accepted draft tokens to those expected from path_prob, at most 1."""
        return min(1.0, (self._accepted + PRIOR_ACCEPTED) / (self._expected + PRIOR_ACCEPTED))

    def price(self, plan: StepPlan) -> StepPrice:
        """Return the price of draft tokens and of time in a step that `admits` allows, for the drafter."""
        return self._budget.price(int(plan.rooms.sum()))

    def select(self, plan: StepPlan, drafts: DraftBatch, usable: np.ndarray) -> np.ndarray:
        """Return how many tokens of each draft to verify, int64 [B]. Drafters put the most likely tokens first.

        usable: int64 [B], largest number of tokens of each draft.
        """
        sequences = plan.producers
        self._budget.prepare(sequences, plan.scheduled_tokens + plan.extra_rows - sequences)
        lengths = np.empty(len(usable), np.int64)
        self._expected += select_calibrated(
            self._budget.addresses, drafts.accept_prob, drafts.parents, drafts.source, drafts.offsets, usable,
            self.calibration, lengths,
        )  # fmt: skip
        return lengths

    def record(self, plan: StepPlan, accepted: int, committed: int, seconds: float) -> None:
        """Learn from a step that took `seconds`, drafting excluded.

        accepted: number of accepted draft tokens, without those that a grammar forced. committed: number of all
        committed tokens.
        """
        # Sums decay with every step, with or without drafts: old results say little about the present.
        self._expected *= DECAY
        self._accepted = DECAY * (self._accepted + accepted)
        scheduled, sequences = plan.scheduled_tokens, plan.producers
        verified = plan.verified + plan.extra_rows
        self._budget.curve.record(scheduled + verified, len(plan), seconds)
        if not (plan.is_drafting or plan.is_backing_off) or not sequences:
            return
        backoff = self._backoff(sequences, has_rows=plan.extra_rows > 0)
        for has_rows in (False, True):
            each = self._backoff(sequences, has_rows)
            if each.is_stopped and (plan.is_backing_off or each is not backoff):
                each.record_pause()
        if not plan.is_drafting:
            return
        self._budget.prepare(sequences, scheduled - sequences)
        self._drafting_s.append(plan.drafting_s)
        self._gains.append(accepted / sequences)
        self._budget.record(sequences, committed, verified, plan.drafting_s)
        saved = self._budget.saved(accepted, scheduled + verified, verified)
        # After a pause, a network first runs the tokens that were committed meanwhile.
        drafting = plan.drafting_s / self._budget.seconds(sequences)
        backoff.record_drafts(saved, drafting, is_beginning=backoff.steps == 0)

    def _may_draft(self, plan: StepPlan, rows: int) -> bool:
        """Return whether the drafter may be called in a step with a number of extra rows."""
        sequences, limits = plan.producers, self._limits
        backoff = self._backoff(sequences, has_rows=rows > 0)
        if backoff.is_stopped:
            return False
        costs = rows or limits.position_steps
        if costs and self._budget.largest_saving(limits.depth, rows, limits.position_steps) <= 0:
            self._report_loss(sequences, rows)
            return False
        if backoff.steps == 0:
            loss = -self._budget.saved(0, plan.scheduled_tokens + rows, rows)
            if self._gains:
                loss += min(self._drafting_s) / self._budget.seconds(sequences) - mean(self._gains)
            backoff.delay_trial(loss)
        return not backoff.is_stopped

    def _backoff(self, sequences: int, has_rows: bool) -> Backoff:
        """Return the pauses of drafting for a number of sequences, since whether drafting pays depends on it.

        has_rows: whether the drafter has extra rows. The numbers from a power of two up to the next one have the same
        pauses. Trials of several sequences have fewer steps, since each says more than a step of a single sequence.
        """
        key = sequences.bit_length(), has_rows
        if key not in self._backoffs:
            runs = MEASURED_RUNS if self._budget.curve.is_learned else None
            steps = MIN_TRIAL_STEPS if sequences == 1 else MIN_TRIAL_STEPS // 2
            self._backoffs[key] = Backoff(runs=runs, min_trial_steps=steps)
        return self._backoffs[key]

    def _report_loss(self, sequences: int, rows: int) -> None:
        """Warn once that drafts, or the drafter's extra rows, cannot pay with a number of sequences, and say why."""
        if self._warn is None:
            return
        depth, position = self._limits.depth, self._limits.position_steps
        longer = self._budget.seconds(sequences * (1 + depth) + rows) / self._budget.seconds(sequences)
        what = (
            f"the drafter adds no rows to steps ({rows // sequences} for each request)"
            if rows
            else "nothing is drafted"
        )
        cause = f"; {self._limits.cause}" if self._limits.cause else ""
        self._warn(
            f"with {sequences} {'request' if sequences == 1 else 'requests'} at once {what}: even a step that accepted "
            f"all of {depth} draft tokens would take as long as {longer + depth * position:.1f} steps without "
            f"drafts{cause}"
        )
        self._warn = None


class DeviceDrafting:
    """Stops drafting on the device while it is not worthwhile."""

    def __init__(self, curve: StepCurve) -> None:
        """curve: durations of plain steps."""
        self._curve = curve
        self._backoff = Backoff(DEVICE_TRIAL, shortest_pause=PLAIN_STEPS, runs=DRAFTING_RUNS, is_stopped=True)
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


@inline
def path_probs(accept_prob, parents, first, end, likely):
    """Write the product of `accept_prob` along the path from the root to each token from `first` on, before `end`."""
    for token in range(first, end):
        parent = parents[token]
        likely[token] = accept_prob[token] * (np.float32(1) if parent < 0 else likely[first + parent])


@kernel(Longs, Floats, Parents, SourceCodes, Tokens, Longs, Float, Longs, returns=Float)
def select_calibrated(budget, accept_prob, parents, sources, offsets, usable, calibration, lengths):
    """Write how many tokens of each draft to verify, int64 [B]; return how many are expected to be accepted.

    budget: `TokenBudget.addresses`. accept_prob, parents, sources, offsets: as in `DraftBatch`. usable: int64 [B],
    number of leading tokens of each draft that can be verified. calibration: factor of path probabilities.
    """
    count, bounds = len(accept_prob), offsets.astype(np.int64)
    likely, calibrated = np.empty(count, np.float32), np.zeros(count, np.float32)
    for index in range(len(usable)):
        first = bounds[index]
        path_probs(accept_prob, parents, first, first + usable[index], likely)
        for token in range(first, first + usable[index]):
            # What a grammar forces is accepted with certainty, and says nothing about the drafter.
            is_certain = sources[token] == GRAMMAR and likely[token] == 1
            calibrated[token] = likely[token] if is_certain else likely[token] * calibration
    select(open_budget(budget), calibrated, bounds, lengths)
    expected = 0.0
    for index in range(len(usable)):
        first = bounds[index]
        lengths[index] = min(lengths[index], usable[index])
        for token in range(first, first + lengths[index]):
            if sources[token] != GRAMMAR:
                expected += likely[token]
    return expected


@kernel(Floats, Parents, Longs, FloatsOut, returns=Nothing)
def path_prob_of(accept_prob, parents, offsets, likely):
    """Write `path_probs` of all drafts. offsets: int64 [B + 1]."""
    for index in range(len(offsets) - 1):
        path_probs(accept_prob, parents, offsets[index], offsets[index + 1], likely)


def path_prob(accept_prob: np.ndarray, parents: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the product of `accept_prob` along each token's path from the root, float32 [T].

    accept_prob: float [T], of each token given its parent. parents and offsets as in `DraftBatch`.
    """
    likely = np.empty(len(accept_prob), np.float32)
    path_prob_of(accept_prob.astype(np.float32), parents.astype(np.int32), offsets.astype(np.int64), likely)
    return likely
