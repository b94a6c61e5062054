"""Decide how many draft tokens a step verifies.

A step of N tokens takes t(N) seconds, see `engine.speculation.step_cost`. B sequences produce B tokens per step, and
one more for each accepted draft token. Of all tokens drafted for a batch, the m most likely ones are verified, where m
>= 0 maximizes the rate (B + sum of their path_prob) / t(N + m).

Drafting takes time as well: that of the drafter, and that of its extra rows in the step. While accepted tokens save
less time than drafting takes, the drafter is called only in every second step, then in every fourth, eighth and
sixteenth.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.drafters.sources import DraftSource
from engine.scheduling.plan import StepPlan
from engine.speculation.step_cost import Cost
from ssd.types import DraftBatch

DECAY = 0.98
"""Decay per step of the sums that calibrate drafts: an effective window of about 50 steps."""
PRIOR_ACCEPTED = 0.5
"""Prior number of accepted tokens in the calibration. With this decay, a drafter whose drafts are never accepted costs
about a hundredth of the time of 50 steps."""
STEPS_TO_PROBE = 20
"""Number of steps without draft tokens after which a likely draft is verified as a probe; otherwise an overestimated
cost would never be corrected."""
PROBE_COST = 0.02
"""Maximum cost of one more token that is passed to the drafter when a probe is due; at a high cost it may not draft."""
MIN_PROBE_GAIN = 2.0
"""Minimum expected number of accepted tokens of a probe."""
RECORD_EVERY = 8
"""Steps per correction of the cost while the drafter is not called, because the correction takes time as well."""
MAX_BACKOFF = 15
"""Longest backoff in steps; calling a useless drafter then costs a sixteenth of calling it in every step."""
BACKOFF_DECAY = 0.9
"""Decay per step with drafts of the sums that decide the backoff: an effective window of about 10 steps."""


class Selection(NamedTuple):
    """Which draft tokens a step verifies."""

    lengths: np.ndarray
    """int64 [B]: number of tokens of each draft, counted from its first one."""
    is_probe: bool = False
    """Whether no draft token was worthwhile and one draft is verified only to measure the cost."""


class TokenBudget:
    """Selects the draft tokens of each step, and learns from the results."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._expected = self._accepted = 0.0
        """Expected (from path_prob) and actual number of recently accepted draft tokens."""
        self._steps_without = 0
        """Number of steps since one with draft tokens."""
        self._unrecorded = 0
        """Consecutive steps that did not correct the cost."""
        self._spent_s = self._saved_s = 0.0
        """Seconds recently spent on drafting, and seconds saved by accepted tokens."""
        self._backoff = self._backoff_left = 0
        """Length of the current backoff, and its remaining steps."""

    @property
    def is_backing_off(self) -> bool:
        """Whether the next step skips the drafter."""
        return self._backoff_left > 0

    @property
    def calibration(self) -> float:
        """Recent ratio of accepted draft tokens to those expected from path_prob, at most 1."""
        return min(1.0, (self._accepted + PRIOR_ACCEPTED) / (self._expected + PRIOR_ACCEPTED))

    def cost_of_one_more(self, tokens: int, sequences: int) -> float:
        """Return the cost to pass to the drafter; see `StepCost.of_one_more`. It is limited while a probe is due."""
        cost = self._cost.of_one_more(tokens, sequences)
        return min(cost, PROBE_COST) if self._is_probe_due else cost

    def seconds(self, tokens: int, sequences: int) -> float:
        """Return the expected duration of a step of `tokens` tokens."""
        return float(self._cost.seconds(np.array([tokens]), sequences)[0])

    def select(self, drafts: DraftBatch, usable: np.ndarray, tokens: int) -> Selection:
        """Select the draft tokens to verify in a step of `tokens` others. Drafters put the most likely tokens first.

        usable: int64 [B], largest number of tokens of each draft.
        """
        sequences = len(drafts.offsets) - 1
        likely = path_prob(drafts.accept_prob, drafts.parents, drafts.offsets)
        starts, sizes = drafts.offsets[:-1].astype(np.int64), np.diff(drafts.offsets)
        places = np.arange(len(likely)) - starts.repeat(sizes)
        likely[places >= usable.repeat(sizes)] = 0
        # What a grammar forces is accepted with certainty, and says nothing about the drafter.
        is_forced = drafts.source == DraftSource.GRAMMAR
        calibrated = np.where(is_forced & (likely == 1), 1.0, likely * self.calibration)
        lengths = worth_verifying(calibrated, drafts.offsets, tokens, sequences, self._cost)
        is_probe = False
        if np.count_nonzero(lengths) == 0 and len(likely):
            gains = np.bincount(np.arange(sequences).repeat(sizes), calibrated, sequences)
            is_probe = self._probe(lengths, usable, gains)
        if np.count_nonzero(lengths):
            self._steps_without = 0
        self._expected += float(likely[(places < lengths.repeat(sizes)) & ~is_forced].sum())
        return Selection(lengths, is_probe)

    def record(self, plan: StepPlan, tokens: int, accepted: int, seconds: float, experts: float | None = None) -> None:
        """Learn from a step of `tokens` tokens that took `seconds`.

        accepted: number of accepted draft tokens, without those that a grammar forced. experts: see `StepResult`.
        """
        # Sums decay with every step, with or without drafts: old results say little about the present.
        self._expected *= DECAY
        self._accepted = DECAY * (self._accepted + accepted)
        self._unrecorded += 1
        self._steps_without += 1
        sequences = len(plan.entries)
        if plan.is_drafting or self._unrecorded == RECORD_EVERY:
            self._cost.record(tokens, sequences, seconds, is_probe=plan.is_probe, experts=experts)
            self._unrecorded = 0
        self._backoff_left = max(0, self._backoff_left - 1)
        if not plan.is_drafting:
            return
        self._spent_s = BACKOFF_DECAY * self._spent_s + plan.drafting_s + self._extra_s(plan, tokens)
        self._saved_s = BACKOFF_DECAY * self._saved_s + accepted * seconds / (sequences + accepted)
        self._backoff = 0 if self._saved_s >= self._spent_s else min(2 * self._backoff + 1, MAX_BACKOFF)
        self._backoff_left = self._backoff

    def _extra_s(self, plan: StepPlan, tokens: int) -> float:
        """Return the seconds that a plan's extra rows add to a step of `tokens` tokens."""
        if not plan.extra_rows:
            return 0.0
        without, whole = self._cost.seconds(np.array([tokens - plan.extra_rows, tokens]), len(plan.entries))
        return float(whole - without)

    def _probe(self, lengths: np.ndarray, usable: np.ndarray, gains: np.ndarray) -> bool:
        """Select the draft with the largest expected gain if a probe is due; return whether it was selected."""
        best = int(gains.argmax())
        if gains[best] < MIN_PROBE_GAIN or not self._is_probe_due:
            return False
        lengths[best] = usable[best]
        return True

    @property
    def _is_probe_due(self) -> bool:
        return self._steps_without >= STEPS_TO_PROBE


def worth_verifying(likely: np.ndarray, offsets: np.ndarray, tokens: int, sequences: int, cost: Cost) -> np.ndarray:
    """Return the number of tokens of each sequence's draft to verify, int64 [B].

    likely: float [T], path_prob of each draft token, descending within each draft. offsets: int [B + 1], into `likely`.
    tokens: number of tokens of the step without drafts. sequences: number of sequences in the step.
    """
    lengths = np.diff(offsets).astype(np.int64)
    if len(likely) == 0:
        return lengths
    order = np.argsort(-likely, kind="stable")
    produced = sequences + np.concatenate(([0.0], np.cumsum(likely[order], dtype=np.float64)))
    rate = produced / cost.seconds(tokens + np.arange(len(likely) + 1), sequences)
    chosen = np.zeros(len(likely), np.bool_)
    chosen[order[: int(rate.argmax())]] = True
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(owner, weights=chosen, minlength=len(lengths)).astype(np.int64)


def path_prob(accept_prob: np.ndarray, parents: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the product of `accept_prob` along each token's path from the root, float64 [T].

    accept_prob: float [T], of each token given its parent. parents and offsets as in `DraftBatch`.
    """
    starts = np.repeat(np.asarray(offsets[:-1], np.int64), np.diff(offsets).astype(np.int64))
    root = len(accept_prob)
    ancestor = np.append(np.where(parents < 0, root, parents + starts), root)
    logs = np.append(np.log(np.maximum(np.asarray(accept_prob, np.float64), 1e-30)), 0.0)
    # Each round doubles the number of ancestors that are included.
    while np.count_nonzero(ancestor < root):
        logs, ancestor = logs + logs[ancestor], ancestor[ancestor]
    return np.exp(logs[:root])
