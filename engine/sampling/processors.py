"""Logits processors before temperature: forbidden end tokens, bias, penalties, grammars.

A sequence has a row of logits after its last token and one after each draft token. A row is processed as if the draft
up to it (in a tree, its ancestors and itself) were committed. The row is used only if that draft is accepted, and then
equals the row of decoding without drafts.

Only tokens that occurred are penalized, so that work does not grow with the vocabulary; that of grammars does.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.speculation.draft_tree import DraftTree

if TYPE_CHECKING:
    from engine.sampling.grammar_state import GrammarError, GrammarState
    from engine.scheduling.sequence import Sequence

NOT_NEEDED = -1
"""Marks a row of logits that is not read."""


class Rows(NamedTuple):
    """The rows of logits of one sequence."""

    sequence: Sequence
    draft: np.ndarray
    """uint32 [k]: draft tokens after the committed ones."""
    tree: DraftTree | None
    """Shape of the draft; None for a path."""
    rows: np.ndarray
    """int64 [k + 1]: rows after the committed tokens and after each draft token, or `NOT_NEEDED`."""
    errors: dict[int, GrammarError] | None = None
    """If given, `process_logits` adds an error for each row that the grammar cannot continue, by index in `rows`."""

    @property
    def depths(self) -> np.ndarray:
        """int64 [k + 1]: number of draft tokens before each row."""
        depths = np.arange(1, len(self.draft) + 1) if self.tree is None else self.tree.depths
        return np.concatenate(([0], depths))


def process_logits(logits: Tensor, rows: SequenceOf[Rows]) -> Tensor:
    """Return processed logits, float32 [M, V]; the argument itself if no request changes its logits."""
    own = [each for each in rows if each.sequence.request.sampling.adjusts]
    if not own:
        return logits
    forbidden = [_forbidden(each) for each in own if each.sequence.request.sampling.min_tokens]
    biased = [_biased(each) for each in own if each.sequence.request.sampling.logit_bias]
    penalized = [_penalized(each) for each in own if each.sequence.token_counts is not None]
    logits = logits.clone()
    if forbidden:
        logits[_on(logits, *_joined(forbidden))] = float("-inf")
    if biased:
        indices, tokens, bias = _joined(biased)
        logits[_on(logits, indices, tokens)] += torch.from_numpy(bias).to(logits)
    if penalized:
        penalize(logits, Penalized(*_joined(penalized)))
    for each in own:
        if each.sequence.grammar is not None:
            _mask(logits, each, each.sequence.grammar)
    return logits


def _forbidden(own: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and ids of end tokens that `min_tokens` forbids, int64 [n] each."""
    sequence = own.sequence
    lacking = sequence.request.sampling.min_tokens - len(sequence.output)
    early = own.rows[(own.depths < lacking) & (own.rows != NOT_NEEDED)]
    ends = sequence.stopping.end_ids
    return np.repeat(early, len(ends)), np.tile(ends, len(early))


def _mask(logits: Tensor, own: Rows, grammar: GrammarState) -> None:
    """Set the logits of tokens that the grammar forbids to -inf, in place.

    Rows with an error are left as they are, and so are those of a drafter that has none of the allowed tokens.
    """
    needed = own.rows != NOT_NEEDED
    allowed, errors = grammar.allowed_along(own.draft, own.tree, needed)
    if own.errors is not None:
        own.errors.update(errors)
    forbidden = torch.from_numpy(~allowed).to(logits.device)
    rows = torch.from_numpy(own.rows[needed]).to(logits.device)
    masked = logits[rows].masked_fill(forbidden, float("-inf"))
    is_empty = masked.amax(dim=1, keepdim=True) == float("-inf")
    logits[rows] = torch.where(is_empty, logits[rows], masked)


def _biased(own: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows, tokens and biases to add, [n] each."""
    bias = own.sequence.request.sampling.logit_bias
    rows = own.rows[own.rows != NOT_NEEDED]
    tokens, values = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)
    return np.repeat(rows, len(tokens)), np.tile(tokens, len(rows)), np.tile(values, len(rows))


def _penalized(own: Rows) -> Penalized:
    assert own.sequence.token_counts is not None
    sampling = own.sequence.request.sampling
    needed = own.rows != NOT_NEEDED
    rows = own.rows[needed]
    seen = own.sequence.token_counts.along(own.draft, own.tree)
    counts = seen.counts[needed].ravel()
    size = len(counts)
    return Penalized(
        rows=np.repeat(rows, len(seen.tokens)),
        tokens=np.tile(seen.tokens, len(rows)),
        in_prompt=np.tile(seen.in_prompt, len(rows)),
        counts=counts,
        repetition=np.full(size, sampling.repetition_penalty, np.float32),
        presence=np.full(size, sampling.presence_penalty, np.float32),
        frequency=np.full(size, sampling.frequency_penalty, np.float32),
    )


class Penalized(NamedTuple):
    """N logits to penalize."""

    rows: np.ndarray
    """int64 [N]; each (row, token) occurs once."""
    tokens: np.ndarray
    """int64 [N]."""
    in_prompt: np.ndarray
    """bool [N]: whether the token occurs in the prompt."""
    counts: np.ndarray
    """float32 [N]: number of its occurrences in the output before the row."""
    repetition: np.ndarray
    """float32 [N]: repetition penalty."""
    presence: np.ndarray
    """float32 [N]: presence penalty."""
    frequency: np.ndarray
    """float32 [N]: frequency penalty."""


def penalize(logits: Tensor, penalized: Penalized) -> None:
    """Apply penalties to logits, float32 [M, V], in place.

    The repetition penalty is CTRL's (Keskar et al., 2019), over prompt and output; the others are OpenAI's, over the
    output.
    """
    rows, tokens, in_prompt, counts, repetition, presence, frequency = (
        torch.from_numpy(array).to(logits.device) for array in penalized
    )
    values = logits[rows, tokens]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(in_prompt | (counts > 0), repeated, values)
    logits[rows, tokens] = values - frequency * counts - presence * (counts > 0)


def _joined(parts: SequenceOf[tuple[np.ndarray, ...]]) -> list[np.ndarray]:
    """Concatenate tuples of arrays column by column."""
    return [np.concatenate(columns) for columns in zip(*parts, strict=True)]


def _on(logits: Tensor, rows: np.ndarray, tokens: np.ndarray) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(rows).to(logits.device), torch.from_numpy(tokens).to(logits.device)
