"""Steps of exactly the tokens that are planned: any request option, prompt chunks, draft paths and trees."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from engine.executor.batch import Batch, build_batch
from engine.executor.runner import Runner
from engine.sampling.logprobs import score_prompts
from engine.scheduling.plan import SequenceResult, StepPlan, StepResult
from engine.speculation.verify import verify_drafts


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
        """Verify drafts, and move the keys and values of accepted tree paths together."""
        for index, logprobs in score_prompts(self._batch, self._logits, self.plan.entries).items():
            self.plan.entries[index].sequence.prompt_logprobs.append(logprobs)
        results = verify_drafts(self.plan, self._batch, self._logits)
        self._compact(results)
        return StepResult(self.plan, results)

    def _compact(self, results: list[SequenceResult]) -> None:
        """Move keys and values of accepted tree paths directly after those of the committed tokens."""
        batch, moves = self._batch, []
        for start, result in zip(batch.logit_offsets.tolist(), results, strict=False):
            if result.plan.tree is not None and len(result.kept):
                from_rows = batch.logit_rows[start + 1 + result.kept]
                to_rows = batch.logit_rows[start + 1 : start + 1 + len(result.kept)]
                moved = from_rows != to_rows
                moves.append((batch.slots[from_rows[moved]], batch.slots[to_rows[moved]]))
        if moves:
            sources, targets = (np.concatenate(slots) for slots in zip(*moves, strict=True))
            if len(sources):
                self._runner.move(sources, targets)
