"""Verify the drafts of a step against the target's logits.

In exact mode the target's token at each position is sampled with noise keyed by seed and position, and the longest path
of draft tokens that equal the target's is kept, so outputs are those of decoding without drafts. In rejection mode,
sampled drafts are verified by `engine.speculation.rejection`. Deterministic candidates are verified in the same way in
both modes: sampling the target's token and keeping the candidate that equals it accepts candidate x with probability
p(x), which is what rejection does where q is one-hot.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.drafters.drafts import DETERMINISTIC
from engine.executor.batch import offsets, rows_before
from engine.executor.kernels.sample import sample_tokens
from engine.sampling.grammar_state import GrammarError
from engine.sampling.logprobs import compute_parts
from engine.sampling.noise import RowSettings, greedy_tokens, probabilities, row_settings
from engine.sampling.processors import Rows, process_logits
from engine.scheduling.kernels import FIRST_TOKEN, PRODUCED, VERIFIED
from engine.scheduling.plan import StepPlan
from engine.scheduling.result import StepResult
from engine.scheduling.sequence import Sequence
from engine.speculation.draft_tree import DraftTree, accept_exactly, depths_of
from engine.speculation.rejection import SampledPaths, verify_by_rejection


def verify_drafts(result: StepResult, indices: np.ndarray, logits: Tensor) -> None:
    """Set the results of some producing sequences: accepted draft tokens and the bonus token after them.

    indices: int64 [n], ascending. logits: float32 [rows, V], after the last committed token and each draft token of
    these sequences. Outputs are not cut where they end.
    """
    if not len(indices):
        return
    plan = result.plan
    bounds = offsets(1 + plan.lengths[indices])
    by_rejection = uses_rejection(plan)[indices]
    result.values[indices, VERIFIED] = plan.lengths[indices]
    for is_rejection, verify in ((False, _verify_exactly), (True, _verify_by_rejection)):
        chosen = np.flatnonzero(by_rejection == is_rejection)
        if len(chosen):
            rows = np.concatenate([np.arange(*bounds[at : at + 2]) for at in chosen.tolist()])
            own = logits if len(rows) == bounds[-1] else logits[rows]
            verify(result, VerifiedSequences.of(plan, indices[chosen], own))
    result.lengths[indices] = result.values[indices, PRODUCED]
    _add_logprobs(result, indices, bounds, logits)


def uses_rejection(plan: StepPlan) -> np.ndarray:
    """Return which drafts have sampled tokens that rejection verifies, bool [P]."""
    q_rows, batch = plan.drafts.q_rows, plan.drafts.batch
    is_sampled = np.zeros(plan.producers, np.bool_)
    if q_rows is None:
        return is_sampled
    for index, sequence in enumerate(plan.producing):
        if sequence.request.sampling.uses_rejection and sequence.request.recorded is None:
            first = int(batch.offsets[index])
            is_sampled[index] = (q_rows[first : first + plan.lengths[index]] != DETERMINISTIC).any()
    return is_sampled


class VerifiedSequences(NamedTuple):
    """Sequences that are verified in the same mode, with a row of logits after the context and each draft token."""

    plan: StepPlan
    indices: np.ndarray
    """int64 [n]: indices of the sequences in the plan."""
    sequences: SequenceOf[Sequence]
    bounds: np.ndarray
    """int64 [n + 1]: where the rows of each sequence begin."""
    depths: np.ndarray
    """int64 [rows]: number of draft tokens before each row."""
    logits: Tensor
    """float32 [rows, V]: processed."""
    errors: list[tuple[int, dict[int, GrammarError]]]
    """Errors of rows that a grammar cannot continue: the place of the sequence in `indices`, and the errors by index in
    its rows."""

    @classmethod
    def of(cls, plan: StepPlan, indices: np.ndarray, logits: Tensor) -> VerifiedSequences:
        """Return the part of some sequences. logits: float32 [rows, V], of their rows."""
        sequences = plan.table.of(plan.rows[indices])
        bounds = offsets(1 + plan.lengths[indices])
        depths, trees = np.zeros(int(bounds[-1]), np.int64), plan.is_tree
        batch, all_depths = plan.drafts.batch, depths_of(plan.drafts.batch.parents, plan.drafts.batch.offsets)
        adjusted: list[Rows] = []
        errors: list[tuple[int, dict[int, GrammarError]]] = []
        for place, (index, sequence) in enumerate(zip(indices.tolist(), sequences, strict=True)):
            own = slice(int(batch.offsets[index]), int(batch.offsets[index]) + int(plan.lengths[index]))
            depths[bounds[place] + 1 : bounds[place + 1]] = all_depths[own]
            if sequence.request.sampling.adjusts:
                tree = DraftTree(batch.parents[own]) if trees[index] else None
                errors.append((place, {}))
                rows = np.arange(bounds[place], bounds[place + 1])
                adjusted.append(Rows(sequence, batch.tokens[own], tree, rows, errors[-1][1]))
        return cls(plan, indices, sequences, bounds, depths, process_logits(logits, adjusted), errors)

    def settings(self) -> RowSettings:
        """Return the sampling settings of the rows."""
        samplings, counts = [sequence.request.sampling for sequence in self.sequences], np.diff(self.bounds)
        lengths = np.array([len(sequence) for sequence in self.sequences])
        return row_settings(samplings, counts, lengths.repeat(counts) + self.depths, self.logits)


def target_tokens(part: VerifiedSequences) -> np.ndarray:
    """Return the target's token after each row, int64 [rows]; recorded tokens take precedence."""
    is_greedy = all(sequence.request.sampling.is_plain_greedy for sequence in part.sequences)
    chosen = greedy_tokens(part.logits) if is_greedy else sample_tokens(part.logits, *part.settings())
    tokens = chosen.cpu().numpy().astype(np.int64)
    for place, sequence in enumerate(part.sequences):
        if sequence.request.recorded is not None:
            rows = np.arange(part.bounds[place], part.bounds[place + 1])
            rest = sequence.recorded_rest
            rows = rows[part.depths[rows] < len(rest)]
            tokens[rows] = rest[part.depths[rows]]
    return tokens


def _verify_exactly(result: StepResult, part: VerifiedSequences) -> None:
    """Keep the draft tokens that equal the target's, up to the first row with an error."""
    batch, values = part.plan.drafts.batch, result.values
    paths = np.zeros((len(values), values.shape[1] - FIRST_TOKEN), np.int64)
    accept_exactly(
        batch.tokens, batch.parents, batch.offsets, part.plan.lengths, part.indices, target_tokens(part), part.bounds,
        values, paths,
    )  # fmt: skip
    if result.paths is not None:
        result.paths[part.indices] = paths[part.indices]
    for place, errors in part.errors:
        if errors:
            index = int(part.indices[place])
            rows = np.append(0, 1 + paths[index])[: values[index, PRODUCED]].tolist()
            if (end := next((at for at, row in enumerate(rows) if row in errors), None)) is not None:
                # The target's token before this row is the last one; nothing was accepted after it.
                values[index, PRODUCED] = end
                result.errors[index] = errors[rows[end]]


def _verify_by_rejection(result: StepResult, part: VerifiedSequences) -> None:
    """Accept tokens of sampled drafts, which are paths."""
    plan, batch = part.plan, part.plan.drafts.batch
    assert plan.drafts.q_rows is not None
    lengths = plan.lengths[part.indices]
    at = rows_before(batch.offsets[:-1][part.indices].astype(np.int64) + lengths, lengths)
    seeds = np.array([sequence.request.sampling.seed for sequence in part.sequences], np.int64)
    positions = np.array([len(sequence) for sequence in part.sequences], np.int64)
    tokens, q_rows = batch.tokens[at].astype(np.int64), plan.drafts.q_rows[at].astype(np.int64)
    paths = SampledPaths(tokens, q_rows, lengths, seeds, positions)
    accepted, chosen = verify_by_rejection(paths, probabilities(part.logits, part.settings()), plan.drafts.q)
    for index, count, token in zip(part.indices.tolist(), accepted.tolist(), chosen.tolist(), strict=True):
        result.values[index, PRODUCED] = count + 1
        result.values[index, FIRST_TOKEN : FIRST_TOKEN + count + 1] = [*batch.tokens_of(index)[:count], token]
        if result.paths is not None:
            result.paths[index, :count] = np.arange(count)


def _add_logprobs(result: StepResult, indices: np.ndarray, bounds: np.ndarray, logits: Tensor) -> None:
    """Add the log-probabilities of the tokens for requests that need them. bounds: of their rows in `logits`."""
    counts, rows, tokens = {}, {}, {}
    for place, index in enumerate(indices.tolist()):
        count = result.plan.producing[index].request.sampling.logprobs
        if count is not None and result.lengths[index]:
            rows[index] = bounds[place] + np.append(0, 1 + result.path_of(index))
            counts[index], tokens[index] = count, result.tokens_of(index)
    result.logprobs.update(compute_parts(logits, rows, tokens, counts))
