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
from engine.scheduling.sequence import Sequence


def adjusted(logits: Tensor, offsets: np.ndarray, sequences: SequenceOf[Sequence]) -> Tensor:
    """Logits, float32 [M, V], after all but temperature and truncation; the argument itself if there is nothing to do.

    offsets: int64 [sequences + 1], each sequence's rows; none for one that produces nothing in this step.
    """
    own = [
        (sequence, np.arange(offsets[index], offsets[index + 1]))
        for index, sequence in enumerate(sequences)
        if sequence.request.sampling.adjusts and offsets[index] < offsets[index + 1]
    ]
    if not own:
        return logits
    forbidden = [_forbidden(sequence, rows) for sequence, rows in own if sequence.request.sampling.min_tokens]
    biased = [_biased(sequence, rows) for sequence, rows in own if sequence.request.sampling.logit_bias]
    penalised = [_penalised(sequence, rows) for sequence, rows in own if sequence.token_counts is not None]
    logits = logits.clone()
    if forbidden:
        logits[_on(logits, *_flat(forbidden))] = float("-inf")
    if biased:
        rows, tokens, bias = _flat(biased)
        logits[_on(logits, rows, tokens)] += torch.from_numpy(bias).to(logits)
    if penalised:
        penalise(logits, Penalised(*_flat(penalised)))
    return logits


def _forbidden(sequence: Sequence, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and tokens of ends that come too early."""
    lacking = sequence.request.sampling.min_tokens - len(sequence.output)
    early = rows[np.concatenate(([0], sequence.draft_depths)) < lacking]
    ends = sequence.stopping.end_ids
    return np.repeat(early, len(ends)), np.tile(ends, len(early))


def _biased(sequence: Sequence, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, tokens and what is added to them."""
    bias = sequence.request.sampling.logit_bias
    tokens, values = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)
    return np.repeat(rows, len(tokens)), np.tile(tokens, len(rows)), np.tile(values, len(rows))


def _penalised(sequence: Sequence, rows: np.ndarray) -> Penalised:
    assert sequence.token_counts is not None
    sampling = sequence.request.sampling
    seen = sequence.token_counts.along(sequence.draft, sequence.tree)
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
