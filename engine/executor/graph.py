"""Graph executor: launches steps of fixed shapes before the results of the step in flight are known.

The device holds the state of running sequences in request slots, verifies the host's drafts or makes drafts with a
head, and commits what it accepts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.drafters.device_chain import DeviceChain
from engine.executor.batch import Batch, build_batch
from engine.executor.eager import score_prompts
from engine.executor.fixed_step import Kind, StepOutput
from engine.executor.kernels.dispatch import next_power_of_2
from engine.executor.runner import Runner
from engine.executor.shapes import SAMPLED as SAMPLED_STEP
from engine.executor.shapes import StepGrid
from engine.executor.transfer import PendingArray
from engine.scheduling.kernels import FIRST_TOKEN, new_pages, write_inputs
from engine.scheduling.plan import NO_ROWS, StepPlan
from engine.scheduling.result import StepResult
from engine.scheduling.sequence import Sequence
from engine.scheduling.table import (
    ABSENT,
    KIND,
    NEEDS_HOST,
    ON_DEVICE,
    SAMPLED,
    TRUNCATES,
    RequestTable,
)
from engine.speculation.verify import verify_drafts

Chunks = tuple[StepPlan, Batch, Tensor]
"""Prompt tokens that ran before a step: their plan, their batch, and the logits of its `logit_rows`."""
MIN_HOST_ROWS = 32
"""Smallest number of rows whose logits a step returns, if any are needed, so that there are few kinds of steps."""


class GraphExecutor:
    """Runs the last token and a draft path of each sequence in steps of fixed shapes.

    Prompt chunks run before such a step, without a graph.
    """

    def __init__(
        self,
        grid: StepGrid,
        runner: Runner,
        page_size: int,
        vocab_size: int,
        max_draft: int,
        chain: DeviceChain | None = None,
    ) -> None:
        """runner: for prompt chunks. chain: drafts on the device; None if drafts come from the host."""
        self.grid = grid
        self.chain = chain
        self._runner = runner
        self.page_size = page_size
        self._vocab_size = vocab_size
        self.max_draft = max_draft

    @property
    def draft_ahead(self) -> int:
        """Number of slots after the computed tokens that the drafting at the end of a step writes."""
        return 0 if self.chain is None else self.chain.depth

    def launch(self, plan: StepPlan) -> GraphStep:
        """Start a step; on a GPU this returns before the device has run it."""
        chunks = self._run_chunks(plan)
        if plan.producers:
            self._install(plan)
        if self.chain is not None:
            self.chain.prepare(plan, lambda sequence: self.grid.state.history[sequence.row])
        output = self._launch_step(plan) if plan.producers else None
        has_hosted = output is not None and self.chain is None and plan.has(NEEDS_HOST)
        hosted, host_rows = host_indices(plan) if has_hosted else NO_ROWS, None
        if output is not None and len(hosted):
            # Copied, because the next step overwrites them; without the padding.
            count = len(hosted) + int(plan.lengths[hosted].sum())
            host_rows = HostRows(hosted, output.logits[:count].clone())
        return GraphStep(self, plan, None if output is None else output.results, chunks, host_rows)

    def release(self, table: RequestTable[Sequence]) -> None:
        """Forget the state of all sequences, because another executor runs the next step. No step may be in flight."""
        if self.chain is not None:
            for sequence in table.of(np.flatnonzero(table.state[:, ON_DEVICE] > 0)):
                self.chain.end(sequence)
        table.state[:, ON_DEVICE] = ABSENT

    def _install(self, plan: StepPlan) -> None:
        """Copy what the device lacks of the producing sequences to it."""
        table, rows = plan.table, plan.rows
        if not plan.lacking_pages:
            return
        known = table.state[rows, ON_DEVICE]
        missing = rows[known == ABSENT]
        if len(missing):
            self.grid.state.install(missing.tolist(), table.of(missing), texts=self.chain is not None)
            table.state[missing, ON_DEVICE] = 0
        added = np.empty((2, plan.lacking_pages), np.int64)
        count = new_pages(table.state, table.pages, rows, self.grid.state.page_tables.shape[1], added)
        self.grid.state.add_pages(added[:, :count])

    def _run_chunks(self, plan: StepPlan) -> Chunks | None:
        """Run the scheduled prompt tokens, except the last token of producing sequences."""
        if not len(plan.chunks):
            return None
        prompts = plan.prompts
        batch = build_batch(prompts, self.page_size)
        if self.chain is None:
            return prompts, batch, self._runner.forward(batch)
        logits, hidden = self._runner.forward_with_states(batch, self.chain.head.hidden_layers)
        self.chain.observe_prompts(prompts, hidden)
        return prompts, batch, logits

    def _launch_step(self, plan: StepPlan) -> StepOutput:
        table, rows, batch = plan.table, plan.rows, plan.drafts.batch
        step = self.grid.step_for(len(rows), len(rows) + plan.verified)
        inputs, kind = step.empty_inputs(), self._kind_of(plan)
        np.subtract(plan.ends, 1, out=inputs.contexts[: len(rows)])
        write_inputs(table.state, rows, batch.tokens, batch.offsets, plan.lengths, inputs.table)
        if self.chain is None and plan.has(NEEDS_HOST):
            host_rows = rows_of(host_indices(plan), plan.lengths)
            inputs = inputs._replace(host_rows=host_rows)
            kind = kind._replace(host_rows=next_power_of_2(max(MIN_HOST_ROWS, len(host_rows))))
        return step.run(inputs, kind)

    def _kind_of(self, plan: StepPlan) -> Kind:
        """Return the kind of a step."""
        drafts = plan.is_drafting and self.chain is not None
        if not plan.has(TRUNCATES):
            return (SAMPLED_STEP if plan.has(SAMPLED) else self.grid.greedy)._replace(drafts=drafts)
        samplings = [sequence.request.sampling for sequence in plan.producing]
        return self.grid.kind_of(samplings, self._vocab_size)._replace(drafts=drafts)


class GraphStep:
    """A launched step."""

    def __init__(
        self,
        executor: GraphExecutor,
        plan: StepPlan,
        results: PendingArray | None,
        chunks: Chunks | None,
        host_rows: HostRows | None,
    ) -> None:
        """results: None if no sequence produces. chunks: prompt tokens that ran before. host_rows: sequences that need
        the host; None without any.
        """
        self.plan = plan
        self._executor = executor
        self._results = results
        self._chunks = chunks
        self._host_rows = host_rows

    def result(self) -> StepResult:
        """See `InFlightStep.result`."""
        plan, chain, width = self.plan, self._executor.chain, FIRST_TOKEN + 1 + self._executor.max_draft
        values = np.empty((0, width), np.int32) if self._results is None else self._results.read()[: plan.producers]
        if chain is not None:
            values, tokens = np.ascontiguousarray(values[:, :width]), values[:, width:]
            plan.drafts = chain.drafts_of(tokens)
        result = StepResult(plan, values)
        if self._chunks is not None:
            score_prompts(*self._chunks)
        if self._host_rows is not None:
            self._host_rows.choose(result)
        return result


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
