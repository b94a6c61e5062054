"""Eager executor: runs steps without padding, with all request options, prompt chunks, draft paths and trees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from engine.drafters.base import NO_OUTPUTS, TargetOutputs
from engine.executor.batch import Batch, build_batch
from engine.executor.runner import Runner
from engine.sampling.logprobs import Logprobs, compute_parts
from engine.sampling.noise import greedy_tokens
from engine.scheduling.plan import SequencePlan, SequenceResult, StepPlan, StepResult
from engine.speculation.verify import verify_drafts


class EagerExecutor:
    """Runs steps without CUDA graphs, and verifies drafts on the host."""

    def __init__(self, runner: Runner, page_size: int, needs: TargetOutputs = NO_OUTPUTS) -> None:
        """needs: outputs of the target for the drafter."""
        self.runner = runner
        self._page_size = page_size
        self.needs = needs

    def launch(self, plan: StepPlan) -> EagerStep:
        """Launch the forward pass; on a GPU this returns before the pass has finished."""
        batch = build_batch(plan.entries, self._page_size)
        if not self.needs.hidden_layers:
            return EagerStep(self, plan, batch, self.runner.forward(batch), None)
        return EagerStep(self, plan, batch, *self.runner.forward_with_states(batch, self.needs.hidden_layers))


class EagerStep:
    """A step whose forward pass is launched."""

    def __init__(
        self, executor: EagerExecutor, plan: StepPlan, batch: Batch, logits: Tensor, states: Tensor | None
    ) -> None:
        """states: hidden states for the drafter, [N, layers, hidden size]."""
        self.plan = plan
        self._executor = executor
        self._batch = batch
        self._logits = logits
        self._states = states

    def result(self) -> StepResult:
        """Verify drafts, and make the keys and values of accepted tree paths contiguous."""
        for index, logprobs in score_prompts(self._batch, self._logits, self.plan.entries).items():
            self.plan.entries[index].sequence.prompt_logprobs.append(logprobs)
        results = verify_drafts(self.plan, self._batch, self._logits)
        self._compact(results)
        if self._states is not None:
            add_hidden_states(results, self._batch, self._states)
        if self._executor.needs.top_k:
            add_top_logits(results, self._batch, self._logits, self._executor.needs.top_k)
        if self.plan.extra_rows:
            add_extra_tokens(results, self._batch.extra_offsets, self._logits)
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
                self._executor.runner.move(sources, targets)


def add_hidden_states(results: list[SequenceResult], batch: Batch, states: Tensor) -> None:
    """Set the hidden states of scheduled and accepted tokens in results. states: [N, layers, hidden size]."""
    counts = [result.plan.scheduled + len(result.kept) for result in results]
    if sum(counts) < len(states):  # Otherwise no token was rejected, and all rows are needed.
        rows = []
        for result, span, first in zip(results, batch.spans, batch.logit_offsets.tolist(), strict=False):
            rows.append(np.arange(span.start, span.start + result.plan.scheduled))
            rows.append(batch.logit_rows[first + 1 + result.kept])
        states = states[np.concatenate(rows)]
    for result, part in zip(results, states.split(counts), strict=True):
        result.hidden = part


def add_top_logits(results: list[SequenceResult], batch: Batch, logits: Tensor, count: int) -> None:
    """Set the `count` largest logits in results. logits: float32 [rows, V], of `batch.logit_rows`."""
    top = logits[: batch.logit_offsets[-1]].topk(count, dim=1)
    for result, first, end in zip(results, batch.logit_offsets[:-1], batch.logit_offsets[1:], strict=True):
        if first < end:
            result.top_tokens, result.top_logits = top.indices[first:end], top.values[first:end]


def add_extra_tokens(results: list[SequenceResult], bounds: np.ndarray, logits: Tensor) -> None:
    """Set the most likely tokens after extra rows in results. bounds: int64 [sequences + 1], into rows of `logits`."""
    tokens = greedy_tokens(logits[bounds[0] : bounds[-1]]).cpu().numpy().astype(np.uint32)
    for result, own in zip(results, np.split(tokens, bounds[1:-1] - bounds[0]), strict=True):
        result.extra_tokens = own


def score_prompts(batch: Batch, logits: Tensor, entries: Sequence[SequencePlan]) -> dict[int, Logprobs]:
    """Return the log-probabilities of prompt tokens that a step scores, by the index of their entry.

    logits: float32 [rows, V], of `batch.logit_rows`.
    """
    bounds = batch.scored_offsets
    counts, rows, tokens = {}, {}, {}
    for index, entry in enumerate(entries):
        if scored := entry.scored:
            counts[index] = entry.sequence.request.sampling.prompt_logprobs or 0
            rows[index] = np.arange(bounds[index], bounds[index + 1])
            tokens[index] = entry.sequence.tokens[scored.start + 1 : scored.stop + 1]
    return compute_parts(logits, rows, tokens, counts)
