"""Sample draft tokens from a drafter's logits, with each request's settings.

Drafts that are compared with the target's tokens use the target's own noise, so that a draft token equals the target's
wherever the two distributions agree. Drafts for rejection sampling use independent noise, which is also keyed by the
number of committed tokens: if a draft is not verified to its end, the next one has other noise at the same positions.
So a drafter may learn from all of its drafts, and whether it proposes a sampled token stays independent of that token's
noise.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.executor.transfer import on_device
from engine.sampling.noise import Stream, gumbel_noise_of, mix64, stream_seeds
from engine.sampling.processors import NOT_NEEDED, Rows, process_logits
from engine.sampling.sampler import RowSettings, row_settings, scores
from engine.scheduling.request import SamplingParams
from engine.scheduling.sequence import Sequence

CONSIDERED = 256
"""Number of most likely tokens that candidates are sampled from; q has no others. Noise for the whole vocabulary would
take longer than the forward pass of a small drafter. At temperature 0.8 the shipped model samples another token in
0.6 % of all cases (2.9 % with 64)."""


class SampledTokens(NamedTuple):
    """Draft tokens for n sequences: c candidates each, in the order in which they are to be tried."""

    tokens: Tensor
    """int64 [n, c]: sampled without replacement; for a greedy request the most likely ones."""
    is_possible: Tensor
    """bool [n, c]: whether the request can sample the token; others must not be proposed."""
    scores: Tensor
    """float32 [n, c]: softmax of logits plus noise. For a greedy request this is the drafter's probability of the
    token; otherwise it is close to 1 if, given the noise, no other token is likely to be sampled."""
    q: Tensor | None
    """float32 [n, V]: the distributions that the tokens were sampled from; None if verification needs none of them."""
    has_q: np.ndarray
    """bool [n]: whether verification needs `q`; tokens of the other sequences are deterministic candidates."""


def sample_drafts(
    sequences: SequenceOf[Sequence],
    drafts: SequenceOf[np.ndarray],
    logits: Tensor,
    count: int = 1,
    *,
    is_coupled: bool = False,
) -> SampledTokens:
    """Sample `count` candidates after each sequence and its draft so far.

    drafts: for each sequence uint32 [k], the path of draft tokens before the candidates. logits: float32 [n, V], the
    drafter's logits after that path, over the target's vocabulary. is_coupled: whether to use the target's noise even
    for requests in rejection mode; the tokens are then deterministic candidates.
    """
    samplings = [sequence.request.sampling for sequence in sequences]
    if any(sampling.adjusts for sampling in samplings):
        logits = process_logits(logits, _last_rows(sequences, drafts))
    if not any(sampling.is_sampled for sampling in samplings):
        return _greedy(logits, count)
    positions = np.array([len(each) + len(draft) for each, draft in zip(sequences, drafts, strict=True)])
    settings = row_settings(samplings, np.ones(len(samplings), np.int64), positions)
    scored = scores(logits, settings)
    considered = scored.topk(min(CONSIDERED, logits.shape[1]), dim=1, sorted=False)
    lengths = np.array([len(sequence) for sequence in sequences])
    has_q = np.array([sampling.uses_rejection and not is_coupled for sampling in samplings], np.bool_)
    noisy = considered.values + _noise(samplings, settings, lengths, considered.indices, has_q)
    best = noisy.topk(min(count, noisy.shape[1]), dim=1)
    q = None
    if has_q.any():
        q = torch.zeros_like(scored).scatter_(1, considered.indices, torch.softmax(considered.values, dim=1))
    return SampledTokens(
        considered.indices.gather(1, best.indices),
        best.values > float("-inf"),
        (best.values - noisy.logsumexp(dim=1, keepdim=True)).exp(),
        q,
        has_q,
    )


def _greedy(logits: Tensor, count: int) -> SampledTokens:
    """Return the most likely tokens."""
    best = logits.topk(min(count, logits.shape[1]), dim=1)
    return SampledTokens(
        best.indices,
        best.values > float("-inf"),
        (best.values - logits.logsumexp(dim=1, keepdim=True)).exp(),
        None,
        np.zeros(len(logits), np.bool_),
    )


def draft_seeds(seeds: Tensor, committed: Tensor) -> Tensor:
    """Return the seeds of the noise of drafts in rejection mode, int64 [n]; committed: int64 [n], committed tokens."""
    return mix64(stream_seeds(seeds, Stream.DRAFT) + committed)


def _noise(
    samplings: SequenceOf[SamplingParams],
    settings: RowSettings,
    lengths: np.ndarray,
    tokens: Tensor,
    is_independent: np.ndarray,
) -> Tensor:
    """Return Gumbel noise of tokens, float32 [n, m]: zeros for greedy requests, otherwise the target's own or not.

    lengths: int64 [n], number of committed tokens. is_independent: bool [n].
    """
    is_sampled = np.array([sampling.is_sampled for sampling in samplings])
    seeds, positions, committed, sampled, independent = (
        on_device(array, tokens.device)
        for array in (settings.seeds, settings.positions, lengths, is_sampled, is_independent)
    )
    seeds = torch.where(independent, draft_seeds(seeds, committed), seeds)
    return gumbel_noise_of(seeds, positions, tokens) * sampled[:, None]


def _last_rows(sequences: SequenceOf[Sequence], drafts: SequenceOf[np.ndarray]) -> list[Rows]:
    return [
        Rows(sequence, draft, None, np.append(np.full(len(draft), NOT_NEEDED), index))
        for index, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True))
    ]
