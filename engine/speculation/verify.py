"""Verify the drafts of a step against the target's logits.

In exact mode the target's token at each position is sampled with noise keyed by seed and position, and the longest path
of draft tokens that equal the target's is kept, so outputs are those of decoding without drafts. In rejection mode,
sampled drafts are verified by `engine.speculation.rejection`. Deterministic candidates are verified in the same way in
both modes: sampling the target's token and keeping the candidate that equals it accepts candidate x with probability
p(x), which is what rejection does where q is one-hot.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.drafters.base import DETERMINISTIC
from engine.executor.batch import Batch
from engine.sampling.grammar_state import GrammarError
from engine.sampling.logprobs import compute_parts
from engine.sampling.noise import greedy_tokens
from engine.sampling.processors import Rows, process_logits
from engine.sampling.sampler import RowSettings, probabilities, row_settings, sample
from engine.scheduling.plan import NO_ROWS, NO_TOKENS, SequencePlan, SequenceResult, StepPlan
from engine.speculation.rejection import SampledDraft, Verdict, verify_by_rejection
from ssd.types import ROOT


def verify_drafts(plan: StepPlan, batch: Batch, logits: Tensor) -> list[SequenceResult]:
    """Return the result of each entry: accepted draft tokens and the bonus token after them.

    logits: float32 [rows, V], of `batch.logit_rows`. Outputs are not cut where they end.
    """
    entries, bounds = plan.entries, batch.logit_offsets
    results = [SequenceResult(entry, NO_TOKENS, NO_ROWS) for entry in entries]
    by_rejection = [index for index, entry in enumerate(entries) if uses_rejection(entry)]
    exactly = [index for index, entry in enumerate(entries) if entry.produces and index not in by_rejection]
    if exactly:
        part = select_part(exactly, plan, batch, logits)
        for index, tokens, errors in zip(exactly, target_tokens(part), part.errors, strict=True):
            results[index] = _verify_exactly(entries[index], tokens, errors)
    if by_rejection:
        part = select_part(by_rejection, plan, batch, logits)
        for index, verdict in zip(by_rejection, _rejected(part, plan.q), strict=True):
            tokens = np.append(entries[index].draft[verdict.kept], np.uint32(verdict.token))
            results[index] = SequenceResult(entries[index], tokens, verdict.kept)
    _add_logprobs(results, bounds, logits)
    return results


def uses_rejection(entry: SequencePlan) -> bool:
    """Whether the draft is verified by rejection: it has sampled tokens and its request is in that mode."""
    request = entry.sequence.request
    if entry.q_rows is None or request.recorded is not None or not request.sampling.uses_rejection:
        return False
    return bool((entry.q_rows != DETERMINISTIC).any())


def accepted_length(draft: np.ndarray, target: np.ndarray) -> int:
    """Return the number of leading draft tokens that equal the target's.

    draft: uint32 [k]. target: uint32 [k + 1], the target's token after the context, after the context and one draft
    token, and so on.
    """
    differs = np.flatnonzero(draft != target[:-1])
    return int(differs[0]) if len(differs) else len(draft)


def accepted_path(draft: np.ndarray, parents: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the nodes of a draft tree that equal the target's tokens, int64 [n], a path from the root.

    draft: uint32 [k]. parents: int32 [k], indices within the draft, `ROOT` for a child of the context; parents precede
    their children. target: uint32 [k + 1], the target's token after the context and after each draft token.
    """
    path: list[int] = []
    at = ROOT
    # Parents precede their children, so one pass over the nodes that equal their parents' successors finds the path.
    for node in np.flatnonzero(draft == target[parents + 1]).tolist():
        if parents[node] == at:
            path.append(node)
            at = node
    return np.array(path, np.int64)


class Part(NamedTuple):
    """Rows of the entries that are verified in the same mode."""

    entries: list[SequencePlan]
    logits: Tensor
    """float32 [m, V]: processed; the entries' rows in order."""
    settings: RowSettings
    bounds: np.ndarray
    """int64 [entries + 1], into those rows."""
    errors: list[dict[int, GrammarError]]
    """For each entry: errors of rows that its grammar cannot continue, by index in the entry's rows."""


def select_part(indices: SequenceOf[int], plan: StepPlan, batch: Batch, logits: Tensor) -> Part:
    """Return the rows of the given producing entries, with processed logits."""
    entries = [plan.entries[index] for index in indices]
    rows = [np.arange(batch.logit_offsets[index], batch.logit_offsets[index + 1]) for index in indices]
    bounds = np.cumsum([0, *map(len, rows)])
    chosen = np.concatenate(rows)
    logits = logits[: len(chosen)] if len(chosen) == batch.logit_offsets[-1] else logits[chosen]
    own = [
        Rows(entry.sequence, entry.draft, entry.tree, np.arange(*pair), {})
        for entry, pair in zip(entries, pairwise(bounds.tolist()), strict=True)
    ]
    samplings = [entry.sequence.request.sampling for entry in entries]
    settings = row_settings(samplings, np.diff(bounds), batch.positions[batch.logit_rows[chosen]] + 1)
    return Part(entries, process_logits(logits, own), settings, bounds, [each.errors or {} for each in own])


def target_tokens(part: Part) -> list[np.ndarray]:
    """Return for each entry the target's token after each of its rows, uint32; recorded tokens take precedence."""
    is_greedy = all(entry.sequence.request.sampling.is_plain_greedy for entry in part.entries)
    tokens = greedy_tokens(part.logits) if is_greedy else sample(part.logits, part.settings)
    own = np.split(tokens.cpu().numpy().astype(np.uint32), part.bounds[1:-1])
    for entry, rows in zip(part.entries, own, strict=True):
        _replay(entry, rows)
    return own


def _verify_exactly(entry: SequencePlan, tokens: np.ndarray, errors: dict[int, GrammarError]) -> SequenceResult:
    """Keep the draft tokens that equal the target's, `tokens`, uint32 [k + 1], up to the first row with an error."""
    if entry.tree is None:
        kept = np.arange(accepted_length(entry.draft, tokens))
    else:
        kept = accepted_path(entry.draft, entry.tree.parents, tokens)
    rows = np.append(0, 1 + kept)
    for index, row in enumerate(rows.tolist() if errors else ()):
        if row in errors:
            # The target's token before this row is the last one; nothing was accepted after it.
            return SequenceResult(entry, tokens[rows[:index]], kept[: max(0, index - 1)], error=errors[row])
    return SequenceResult(entry, tokens[rows], kept)


def _replay(entry: SequencePlan, tokens: np.ndarray) -> None:
    """Replace the target's tokens with recorded ones, up to the end of the record."""
    if entry.sequence.request.recorded is None:
        return
    rest = entry.sequence.recorded_rest
    depths = np.append(0, entry.draft_depths)
    is_recorded = depths < len(rest)
    tokens[is_recorded] = rest[depths[is_recorded]]


def _rejected(part: Part, q: Tensor | None) -> list[Verdict]:
    drafts = []
    for entry, row in zip(part.entries, part.bounds.tolist(), strict=False):
        assert entry.q_rows is not None
        seed, position = entry.sequence.request.sampling.seed, len(entry.sequence)
        drafts.append(SampledDraft(entry.draft, entry.parents, entry.q_rows, row, seed, position))
    return verify_by_rejection(drafts, probabilities(part.logits, part.settings), q)


def _add_logprobs(results: SequenceOf[SequenceResult], bounds: np.ndarray, logits: Tensor) -> None:
    """Add the log-probabilities of the tokens for requests that need them."""
    counts = {
        index: count
        for index, result in enumerate(results)
        if len(result.tokens) and (count := result.plan.sequence.request.sampling.logprobs) is not None
    }
    rows = {index: bounds[index] + np.append(0, 1 + results[index].kept) for index in counts}
    tokens = {index: results[index].tokens for index in counts}
    for index, logprobs in compute_parts(logits, rows, tokens, counts).items():
        results[index].logprobs = logprobs
