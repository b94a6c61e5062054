"""Graph executor: launches steps of fixed shapes before the results of the step in flight are known.

The device holds the state of running sequences in request slots, verifies the host's drafts or makes drafts with a
head, and commits what it accepts.
"""

from __future__ import annotations

import numpy as np

from engine.drafters.model_based.device_chain import DeviceChain
from engine.executor.batch import build_batch
from engine.executor.device_state import RequestSlots
from engine.executor.fixed_step import INPUT_COLUMNS, RESULT_COLUMNS, HostInputs
from engine.executor.runner import Runner
from engine.executor.shapes import StepGrid
from engine.executor.transfer import PendingArray
from engine.scheduling.plan import NO_ROWS, NO_TOKENS, SequencePlan, SequenceResult, StepPlan, StepResult


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
        self._slots = RequestSlots(grid.state)
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._max_draft = max_draft

    @property
    def draft_ahead(self) -> int:
        """Number of slots after the computed tokens that the drafting at the end of a step writes."""
        return 0 if self.chain is None else self.chain.depth

    def launch(self, plan: StepPlan) -> GraphStep:
        """Start a step; on a GPU this returns before the device has run it."""
        self._run_chunks(plan)
        self._slots.release_ended()
        producing = plan.producing
        if self.chain is not None:
            self.chain.prepare(plan, lambda sequence: self.grid.state.history[self._slots.of(sequence)])
        results = self._launch_step(plan, producing) if producing else None
        return GraphStep(plan, results, self._max_draft, None if self.chain is None else self.chain.source)

    def release(self) -> None:
        """Release all request slots, because another executor runs the next step. No step may be in flight."""
        self._slots.release_ended()
        if self.chain is not None:
            for sequence in self._slots.assigned:
                self.chain.end(sequence)
        self._slots.release_all()

    def _run_chunks(self, plan: StepPlan) -> None:
        """Run the scheduled prompt tokens, except the last token of producing entries."""
        chunks = [
            SequencePlan(entry.sequence, entry.computed, entry.scheduled - entry.produces, produces=False)
            for entry in plan.entries
            if entry.scheduled > entry.produces
        ]
        if not chunks:
            return
        batch = build_batch(chunks, self._page_size)
        if self.chain is None:
            self._runner.forward(batch)
        else:
            hidden = self._runner.forward_with_states(batch, self.chain.head.hidden_layers)[1]
            self.chain.observe_chunks(chunks, hidden, drafts=plan.is_drafting)

    def _launch_step(self, plan: StepPlan, producing: list[SequencePlan]) -> PendingArray:
        slots = [self._slots.of(entry.sequence) for entry in producing]
        self._slots.add_pages([entry.sequence for entry in producing])
        table = np.zeros((len(producing), INPUT_COLUMNS + self._max_draft), np.int32)
        table[:, 0] = slots
        table[:, 1] = [1 + entry.max_verified for entry in producing]
        for row, entry in zip(table, producing, strict=True):
            row[INPUT_COLUMNS : INPUT_COLUMNS + len(entry.draft)] = entry.draft
        contexts = [entry.sequence.end_after(entry.scheduled) - 1 for entry in producing]
        kind = self.grid.kind_of([entry.sequence.request.sampling for entry in producing], self._vocab_size)
        return self.grid.run(
            HostInputs(table, contexts), kind._replace(drafts=plan.is_drafting and self.chain is not None)
        )


class GraphStep:
    """A launched step."""

    def __init__(self, plan: StepPlan, results: PendingArray | None, max_draft: int, source: int | None) -> None:
        """results: None if no sequence produces. source: code of the draft tokens if the device made them."""
        self.plan = plan
        self._results = results
        self._max_draft = max_draft
        self._source = source

    def result(self) -> StepResult:
        """See `InFlightStep.result`."""
        rows = np.empty((0, RESULT_COLUMNS), np.int32) if self._results is None else self._results.read()
        tokens, counts = rows[:, RESULT_COLUMNS:].astype(np.uint32), iter(rows[:, :RESULT_COLUMNS].tolist())
        drafts = tokens[:, 1 + self._max_draft :]
        results, index = [], 0
        for entry in self.plan.entries:
            if not entry.produces:
                results.append(SequenceResult(entry, NO_TOKENS, NO_ROWS))
                continue
            produced, drafted = next(counts)
            if self._source is None:
                entry.draft, entry.sources = entry.draft[:drafted], entry.sources[:drafted]
            else:
                entry.draft, entry.sources = drafts[index, :drafted], np.full(drafted, self._source, np.uint8)
            results.append(SequenceResult(entry, tokens[index, :produced], np.arange(produced - 1)))
            index += 1
        return StepResult(self.plan, results)
