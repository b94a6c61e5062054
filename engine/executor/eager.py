"""Steps of exactly the tokens that are planned: any request option, prompt chunks, draft paths and trees."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from engine.executor.batch import Batch, build_batch
from engine.executor.runner import Runner
from engine.sampling.sampler import Chosen, choose
from engine.scheduling.plan import NO_TOKENS, SequencePlan, SequenceResult, StepPlan, StepResult
from engine.speculation.verify import accepted_length, accepted_path

FIRST_ROW = np.arange(1)
"""The row of the last committed token, from which a sequence without a draft produces."""


class EagerExecutor:
    """Runs a step by ordinary calls of PyTorch, and verifies drafts on the host."""

    def __init__(self, runner: Runner, page_size: int) -> None:
        self.runner = runner
        self._page_size = page_size

    def launch(self, plan: StepPlan) -> EagerStep:
        """Run the forward pass; on a GPU this returns before it has ended."""
        batch = build_batch(plan.entries, self._page_size)
        return EagerStep(self.runner, plan, batch, self.runner.forward(batch))


class EagerStep:
    """A step whose forward pass is launched."""

    is_done = True
    """Reading the logits is a part of the step."""

    def __init__(self, runner: Runner, plan: StepPlan, batch: Batch, logits: Tensor) -> None:
        self.plan = plan
        self._runner = runner
        self._batch = batch
        self._logits = logits

    def result(self) -> StepResult:
        """Choose tokens, verify drafts, and move the keys and values of accepted tree paths together."""
        entries = self.plan.entries
        chosen = choose(self._batch, self._logits, entries)
        rows = kept_rows(self._batch, chosen, entries)
        self._compact(rows)
        firsts = self._batch.logit_offsets[:-1].tolist()
        results = []
        for index, (entry, own, first) in enumerate(zip(entries, rows, firsts, strict=True)):
            if len(own) == 0:
                results.append(SequenceResult(entry, NO_TOKENS, own))
                continue
            logprobs = chosen.logprobs.get(index)
            kept_logprobs = None if logprobs is None else logprobs.at(own)
            results.append(SequenceResult(entry, chosen.tokens[first + own], own[1:] - 1, kept_logprobs))
        return StepResult(self.plan, results)

    def _compact(self, kept: list[np.ndarray]) -> None:
        """Move keys and values of accepted tree paths directly after those of the committed tokens."""
        batch, moves = self._batch, []
        for start, span, rows in zip(batch.logit_offsets.tolist(), batch.spans, kept, strict=False):
            if span.tree is not None and len(rows):
                from_rows, to_rows = batch.logit_rows[start + rows], batch.logit_rows[start : start + len(rows)]
                moved = from_rows != to_rows
                moves.append((batch.slots[from_rows[moved]], batch.slots[to_rows[moved]]))
        if moves:
            sources, targets = (np.concatenate(slots) for slots in zip(*moves, strict=True))
            if len(sources):
                self._runner.move(sources, targets)


def kept_rows(batch: Batch, chosen: Chosen, entries: list[SequencePlan]) -> list[np.ndarray]:
    """Return for each sequence the rows, int64, that yield its tokens: the last committed token's, then those of
    accepted draft tokens; none for a sequence that does not produce.
    """
    kept = []
    bounds = batch.logit_offsets.tolist()
    for index, entry in enumerate(entries):
        first, end = bounds[index], bounds[index + 1]
        if end - first <= 1:
            kept.append(FIRST_ROW[: end - first])
        elif entry.tree is None:
            kept.append(np.arange(accepted_length(entry.draft, chosen.tokens[first:end]) + 1))
        else:
            path = accepted_path(entry.draft, entry.tree.parents, chosen.tokens[first:end])
            kept.append(np.concatenate(([0], 1 + path)))
    return kept
