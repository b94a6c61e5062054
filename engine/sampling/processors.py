"""What a request's settings do to its logits before the temperature: forbidden ends, bias, penalties.

A sequence has a row for its last token and one for each token of its draft. A row is treated as if the draft up to it
(in a tree, its ancestors and itself) were committed. It is only used if that draft turns out right, and then this is
what it would have been without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from engine.sampling.penalties import Penalised, penalise
from engine.scheduling.plan import SequencePlan


def adjusted(logits: Tensor, offsets: np.ndarray, entries: SequenceOf[SequencePlan]) -> Tensor:
    """Logits, float32 [M, V], after all but temperature and truncation; the argument itself if there is nothing to do.

    offsets: int64 [entries + 1], each sequence's rows; none for one that produces nothing in this step.
    """
    own = [
        (entry, np.arange(offsets[index], offsets[index + 1]))
        for index, entry in enumerate(entries)
        if entry.sequence.request.sampling.adjusts and offsets[index] < offsets[index + 1]
    ]
    if not own:
        return logits
    forbidden = [_forbidden(entry, rows) for entry, rows in own if entry.sequence.request.sampling.min_tokens]
    biased = [_biased(entry, rows) for entry, rows in own if entry.sequence.request.sampling.logit_bias]
    penalised = [_penalised(entry, rows) for entry, rows in own if entry.sequence.token_counts is not None]
    logits = logits.clone()
    if forbidden:
        logits[_on(logits, *_flat(forbidden))] = float("-inf")
    if biased:
        rows, tokens, bias = _flat(biased)
        logits[_on(logits, rows, tokens)] += torch.from_numpy(bias).to(logits)
    if penalised:
        penalise(logits, Penalised(*_flat(penalised)))
    return logits


def _forbidden(entry: SequencePlan, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and tokens of ends that come too early."""
    sequence = entry.sequence
    lacking = sequence.request.sampling.min_tokens - len(sequence.output)
    early = rows[np.concatenate(([0], entry.draft_depths)) < lacking]
    ends = sequence.stopping.end_ids
    return np.repeat(early, len(ends)), np.tile(ends, len(early))


def _biased(entry: SequencePlan, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, tokens and what is added to them."""
    bias = entry.sequence.request.sampling.logit_bias
    tokens, values = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)
    return np.repeat(rows, len(tokens)), np.tile(tokens, len(rows)), np.tile(values, len(rows))


def _penalised(entry: SequencePlan, rows: np.ndarray) -> Penalised:
    sequence = entry.sequence
    assert sequence.token_counts is not None
    sampling = sequence.request.sampling
    seen = sequence.token_counts.along(entry.draft, entry.tree)
    size = seen.counts.size
    return Penalised(
        rows=np.repeat(rows, len(seen.tokens)),
        tokens=np.tile(seen.tokens, len(rows)),
        in_prompt=np.tile(seen.in_prompt, len(rows)),
        counts=seen.counts.ravel(),
        repetition=np.full(size, sampling.repetition_penalty, np.float32),
        presence=np.full(size, sampling.presence_penalty, np.float32),
        frequency=np.full(size, sampling.frequency_penalty, np.float32),
    )


def _flat(parts: SequenceOf[tuple[np.ndarray, ...]]) -> list[np.ndarray]:
    """Tuples of arrays as one tuple of longer arrays."""
    return [np.concatenate(columns) for columns in zip(*parts, strict=True)]


def _on(logits: Tensor, rows: np.ndarray, tokens: np.ndarray) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(rows).to(logits.device), torch.from_numpy(tokens).to(logits.device)
