"""Sequences of a step of the graph executor whose tokens the host chooses, from the logits of the step.

Their requests want log-probabilities, penalties, a bias, a grammar, or rejection sampling. The device runs their rows
with all others and also chooses tokens, which are ignored: their state on the device is installed anew before the next
step. Prompt tokens with log-probabilities are scored here, too.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.executor.batch import Batch, build_batch
from engine.executor.eager import score_prompts
from engine.scheduling.plan import NO_ROWS, SequencePlan, SequenceResult, StepPlan
from engine.scheduling.table import ABSENT, KIND, NEEDS_HOST, ON_DEVICE
from engine.speculation.verify import verify_drafts


class Chunks(NamedTuple):
    """Prompt tokens that ran before a step."""

    entries: SequenceOf[SequencePlan]
    batch: Batch
    logits: Tensor
    """float32 [M, V], of `batch.logit_rows`."""

    def score(self) -> None:
        """Add the log-probabilities of prompt tokens to the sequences that want them."""
        if self.batch.scored_offsets[-1] > self.batch.scored_offsets[0]:
            for index, logprobs in score_prompts(self.batch, self.logits, self.entries).items():
                self.entries[index].sequence.prompt_logprobs.append(logprobs)


def host_indices(plan: StepPlan) -> np.ndarray:
    """Return the indices of the producing sequences that need the host, int64."""
    assert plan.table is not None
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
    """float32 [rows or more, V]: of their last tokens and drafts."""

    def results(self, plan: StepPlan, page_size: int) -> dict[int, SequenceResult]:
        """Choose the tokens of the sequences that still run; return their results by index in `plan.rows`."""
        assert plan.table is not None
        entries = [entry_of(plan, index) for index in self.indices.tolist()]
        own = replace(plan, chunks=entries, table=None, decoding=self.indices[:0], lengths=None, drafts=None)
        results = verify_drafts(own, build_batch(entries, page_size), self.logits)
        plan.table.state[plan.rows[self.indices], ON_DEVICE] = ABSENT
        return dict(zip(self.indices.tolist(), results, strict=True))


def entry_of(plan: StepPlan, index: int) -> SequencePlan:
    """Return a producing sequence of a launched step with its draft, as if it ran its last token alone."""
    if index in plan.own_entries or plan.lengths is None:
        entry = plan.own_entries[index] if index in plan.own_entries else plan.producing[index]
    else:
        assert plan.table is not None
        entry = SequencePlan(plan.table.of(plan.rows[index : index + 1])[0], 0, 1, produces=True)
    draft = plan.draft
    own = slice(int(draft.offsets[index]), int(draft.offsets[index]) + int(draft.lengths[index]))
    return replace(
        entry, computed=len(entry.sequence) - 1, scheduled=1, draft=draft.tokens[own], sources=draft.sources[own],
        max_verified=int(draft.lengths[index]),
    )  # fmt: skip
