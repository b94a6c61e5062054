"""Eager executor: runs steps without padding, with all request options, prompt chunks, draft paths and trees."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from engine.drafters.base import NO_OUTPUTS, TargetOutputs
from engine.executor.batch import Batch, build_batch, offsets, scored
from engine.executor.runner import Runner
from engine.sampling.logprobs import compute_parts
from engine.sampling.noise import greedy_tokens
from engine.scheduling.kernels import FIRST_TOKEN
from engine.scheduling.plan import StepPlan
from engine.scheduling.result import StepResult
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
        batch = build_batch(plan, self._page_size)
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
        plan, batch, logits, count = self.plan, self._batch, self._logits, self._executor.needs.top_k
        score_prompts(plan, batch, logits)
        result = empty_result(plan)
        rows = batch.logit_offsets[-1]
        verify_drafts(result, np.arange(plan.producers), logits[:rows])
        if result.paths is not None:
            self._compact(result)
        if self._states is not None:
            result.hidden, result.hidden_offsets = kept_states(result, batch, self._states)
        if count:
            top = logits[:rows].topk(count, dim=1)
            result.top_tokens, result.top_logits = top.indices, top.values
        if plan.extra_rows:
            tokens = greedy_tokens(logits[batch.scored_offsets[-1] :])
            result.extra_tokens = tokens.cpu().numpy().astype(np.uint32)
        return result

    def _compact(self, result: StepResult) -> None:
        """Move keys and values of accepted tree paths directly after those of the committed tokens."""
        batch, accepted = self._batch, result.accepted
        assert result.paths is not None
        is_node = np.arange(result.paths.shape[1]) < accepted[:, None]
        first = (1 + batch.logit_offsets[:-1]).repeat(accepted)
        sources = batch.slots[batch.logit_rows[first + result.paths[is_node]]]
        targets = batch.slots[batch.logit_rows[first + is_node.nonzero()[1]]]
        moved = sources != targets
        if moved.any():
            self._executor.runner.move(sources[moved], targets[moved])


def empty_result(plan: StepPlan) -> StepResult:
    """Return the result of a step without any tokens, with room for those of its drafts."""
    width = 1 + int(plan.lengths.max(initial=0))
    paths = np.zeros((plan.producers, width), np.int64) if plan.is_tree.any() else None
    return StepResult(plan, np.zeros((plan.producers, FIRST_TOKEN + width), np.int32), paths)


def kept_states(result: StepResult, batch: Batch, states: Tensor) -> tuple[Tensor, np.ndarray]:
    """Return `StepResult.hidden` and `hidden_offsets`. states: [N, layers, hidden size], of all tokens of a batch."""
    plan, counts = result.plan, result.plan.scheduled.copy()
    counts[: plan.producers] += result.accepted
    if counts.sum() < len(states):  # Otherwise no token was rejected, and all rows are needed.
        wanted = np.ones(len(states), np.bool_)
        for index in range(plan.producers):
            end = batch.starts[index] + plan.scheduled[index]
            wanted[end : batch.starts[index + 1]] = False
            wanted[end + result.path_of(index)] = True
        states = states[np.flatnonzero(wanted)]
    return states, offsets(counts)


def score_prompts(plan: StepPlan, batch: Batch, logits: Tensor) -> None:
    """Add the log-probabilities of prompt tokens to the sequences that want them.

    logits: float32 [rows, V], of `batch.logit_rows`.
    """
    bounds = batch.scored_offsets
    if bounds[0] == bounds[-1]:
        return
    counts, rows, tokens = {}, {}, {}
    sequences = plan.table.of(plan.all_rows)
    for index in np.flatnonzero(np.diff(bounds) * plan.still_runs).tolist():
        sequence = sequences[index]
        positions = scored(sequence, int(plan.computed[index]), int(plan.scheduled[index]))
        counts[index] = sequence.request.sampling.prompt_logprobs or 0
        rows[index] = np.arange(bounds[index], bounds[index + 1])
        tokens[index] = sequence.tokens[positions.start + 1 : positions.stop + 1]
    for index, logprobs in compute_parts(logits, rows, tokens, counts).items():
        sequences[index].prompt_logprobs.append(logprobs)
