"""Sequences of a step of the graph executor whose tokens the host chooses, from the logits of the step.

Their requests want log-probabilities, penalties, a bias, a grammar, or rejection sampling. The device runs their rows
with all others and also chooses tokens, which are ignored: their state on the device is installed anew before the next
step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.scheduling.plan import NO_ROWS, StepPlan
from engine.scheduling.result import StepResult
from engine.scheduling.table import ABSENT, KIND, NEEDS_HOST, ON_DEVICE
from engine.speculation.verify import verify_drafts


def host_indices(plan: StepPlan) -> np.ndarray:
    """Return the indices of the producing sequences that need the host, int64."""
    return np.flatnonzero(plan.table.state[plan.rows, KIND] & NEEDS_HOST)


def rows_of(indices: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the rows of producing sequences in a step, int64. lengths: int64 [P], numbers of draft tokens."""
    ends = np.cumsum(1 + lengths)
    parts = [np.arange(ends[index] - 1 - lengths[index], ends[index]) for index in indices]
    return np.concatenate([NO_ROWS, *parts])


class HostRows(NamedTuple):
    """The producing sequences of a step that need the host."""

    indices: np.ndarray
    """int64 [H], in `StepPlan.rows`."""
    logits: Tensor
    """float32 [rows, V]: of their last tokens and drafts."""

    def choose(self, result: StepResult) -> None:
        """Choose the tokens of the sequences that still run."""
        plan, runs = result.plan, result.plan.still_runs[self.indices]
        rows = np.flatnonzero(runs.repeat(1 + plan.lengths[self.indices]))
        logits = self.logits if len(rows) == len(self.logits) else self.logits[rows]
        verify_drafts(result, self.indices[runs], logits)
        plan.table.state[plan.rows[self.indices[runs]], ON_DEVICE] = ABSENT
