"""Sample draft tokens from a drafter's logits, with each request's settings.

Exact mode uses the target's own noise, so that a draft token equals the target's wherever the two distributions agree.
Rejection mode uses independent noise.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.executor.transfer import on_device
from engine.sampling.noise import Stream, gumbel_noise, stream_seeds
from engine.sampling.processors import NOT_NEEDED, Rows, process_logits
from engine.sampling.sampler import RowSettings, row_settings, scores
from engine.scheduling.request import SamplingParams
from engine.scheduling.sequence import Sequence


class SampledTokens(NamedTuple):
    """Draft tokens for n sequences: c candidates each, in the order in which they are to be tried."""

    tokens: Tensor
    """int64 [n, c]: sampled without replacement; for a greedy request the most likely ones."""
    is_possible: Tensor
    """bool [n, c]: whether the request can sample the token; others must not be proposed."""
    q: Tensor
    """float32 [n, V]: the distributions that the tokens were sampled from."""
    has_q: np.ndarray
    """bool [n]: whether verification needs `q`; tokens of the other sequences are deterministic candidates."""


def sample_drafts(
    sequences: SequenceOf[Sequence], drafts: SequenceOf[np.ndarray], logits: Tensor, count: int = 1
) -> SampledTokens:
    """Sample `count` candidates after each sequence and its draft so far.

    drafts: for each sequence uint32 [k], the path of draft tokens before the candidates. logits: float32 [n, V], the
    drafter's logits after that path, over the target's vocabulary.
    """
    samplings = [sequence.request.sampling for sequence in sequences]
    positions = np.array([len(each) + len(draft) for each, draft in zip(sequences, drafts, strict=True)])
    settings = row_settings(samplings, np.ones(len(samplings), np.int64), positions)
    scored = scores(process_logits(logits, _last_rows(sequences, drafts)), settings)
    tokens = (scored + _noise(samplings, settings, scored)).topk(count, dim=1).indices
    return SampledTokens(
        tokens,
        scored.gather(1, tokens) > float("-inf"),
        torch.softmax(scored, dim=1),
        np.array([sampling.uses_rejection for sampling in samplings], np.bool_),
    )


def _noise(samplings: SequenceOf[SamplingParams], settings: RowSettings, scored: Tensor) -> Tensor:
    """Return Gumbel noise, float32 [n, V]: zeros for greedy requests, the target's own in exact mode."""
    is_sampled, uses_rejection = (
        torch.tensor([getattr(sampling, name) for sampling in samplings], device=scored.device)
        for name in ("is_sampled", "uses_rejection")
    )
    seeds, positions = (on_device(array, scored.device) for array in (settings.seeds, settings.positions))
    seeds = torch.where(uses_rejection, stream_seeds(seeds, Stream.DRAFT), seeds)
    return gumbel_noise(seeds, positions, scored.shape[1]) * is_sampled[:, None]


def _last_rows(sequences: SequenceOf[Sequence], drafts: SequenceOf[np.ndarray]) -> list[Rows]:
    return [
        Rows(sequence, draft, None, np.append(np.full(len(draft), NOT_NEEDED), index))
        for index, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True))
    ]
