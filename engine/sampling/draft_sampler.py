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

from engine.drafters.drafts import DETERMINISTIC
from engine.executor.transfer import on_device
from engine.sampling.choice import CONSIDERED, NONE, choose_rows
from engine.sampling.noise import Stream, gumbel_noise_of, mix64, row_settings, scores, stream_seeds
from engine.sampling.processors import NOT_NEEDED, Rows, process_logits
from engine.scheduling.sequence import Sequence


class SampledTokens(NamedTuple):
    """Draft tokens for n rows of logits: c candidates each, in the order in which they are to be tried."""

    tokens: np.ndarray
    """int64 [n, c]: sampled without replacement; for a greedy request the most likely ones. `NONE` after the
    last one that the request can sample."""
    scores: np.ndarray
    """float32 [n, c]: softmax of logits plus noise. For a greedy request this is the drafter's probability of the
    token; otherwise it is close to 1 if, given the noise, no other token is likely to be sampled."""
    q: Tensor | None
    """float32 [n, V]: the distributions that the tokens were sampled from; None if verification needs none of them."""
    has_q: np.ndarray
    """bool [n]: whether verification needs `q`; tokens of the other rows are deterministic candidates."""

    def q_rows(self, first: int) -> np.ndarray:
        """Return the row of the distribution of each row's tokens, int64 [n], `DETERMINISTIC` for none.

        first: number of rows before those of `q`.
        """
        return np.where(self.has_q, np.arange(first, first + len(self.has_q)), DETERMINISTIC)


class DraftSampler:
    """Samples draft tokens for the B sequences of a step."""

    def __init__(self, sequences: SequenceOf[Sequence], *, is_coupled: bool = False) -> None:
        """is_coupled: whether to use the target's noise even for requests in rejection mode; the tokens are then
        deterministic candidates.
        """
        self._sequences = sequences
        self._samplings = [sequence.request.sampling for sequence in sequences]
        self.is_sampled = np.array([sampling.is_sampled for sampling in self._samplings], np.bool_)
        """bool [B]."""
        self.adjusts = any(sampling.adjusts for sampling in self._samplings)
        """Whether logits depend on the tokens of a draft."""
        self._temperatures = np.where(self.is_sampled, [each.temperature for each in self._samplings], 0.0)
        self._seeds = np.array([sampling.seed for sampling in self._samplings], np.int64)
        self._lengths = np.array([len(sequence) for sequence in sequences], np.int64)
        self._has_q = np.array([each.uses_rejection and not is_coupled for each in self._samplings], np.bool_)
        self._runs_kernel = not self._has_q.any() and not any(each.truncates for each in self._samplings)

    def sample(
        self, logits: Tensor, owner: np.ndarray, depth: int, count: int, paths: SequenceOf[np.ndarray] | None = None
    ) -> SampledTokens:
        """Sample at most `count` candidates after each of n drafts of `depth` tokens.

        logits: float32 [n, V], the drafter's logits after each draft, over the target's vocabulary. owner: int64 [n],
        index of its sequence. paths: the drafts, uint32 [depth] each; only needed if `adjusts`.
        """
        if self.adjusts:
            assert paths is not None
            logits = process_logits(logits, self._last_rows(owner, paths))
        positions = self._lengths[owner] + depth
        if self._runs_kernel and logits.device.type == "cpu":
            size = len(owner), min(count, logits.shape[1])
            chosen = np.full(size, NONE), np.zeros(size, np.float32)
            temperatures = self._temperatures[owner].astype(np.float32)
            # Copied, because the kernel overwrites them.
            choose_rows(logits.numpy().copy(), temperatures, self._seeds[owner], positions, *chosen)
            return SampledTokens(*chosen, None, self._has_q[owner])
        return self._sample_on_device(logits, owner, positions, count)

    def _sample_on_device(self, logits: Tensor, owner: np.ndarray, positions: np.ndarray, count: int) -> SampledTokens:
        """Sample with PyTorch, on any device and with any settings."""
        has_q = self._has_q[owner]
        if not self.is_sampled.any():
            best = logits.topk(min(count, logits.shape[1]), dim=1)
            return _on_host(best.indices, best.values, logits.logsumexp(dim=1, keepdim=True), None, has_q)
        samplings = [self._samplings[index] for index in owner.tolist()]
        scored = scores(logits, row_settings(samplings, np.ones(len(owner), np.int64), positions, logits))
        considered = scored.topk(min(CONSIDERED, logits.shape[1]), dim=1, sorted=False)
        noisy = considered.values + self._noise(owner, positions, considered.indices)
        best = noisy.topk(min(count, noisy.shape[1]), dim=1)
        q = None
        if has_q.any():
            q = torch.zeros_like(scored).scatter_(1, considered.indices, torch.softmax(considered.values, dim=1))
        tokens = considered.indices.gather(1, best.indices)
        # Scores of greedy requests are relative to all tokens.
        is_sampled = on_device(self.is_sampled[owner, None], logits.device)
        total = torch.where(is_sampled, noisy.logsumexp(dim=1, keepdim=True), logits.logsumexp(dim=1, keepdim=True))
        return _on_host(tokens, best.values, total, q, has_q)

    def _noise(self, owner: np.ndarray, positions: np.ndarray, tokens: Tensor) -> Tensor:
        """Return Gumbel noise of tokens, float32 [n, m]: zeros for greedy requests, otherwise the target's own unless
        the request's drafts need q.
        """
        seeds, committed, keys, sampled, independent = (
            on_device(array, tokens.device)
            for array in (
                self._seeds[owner], self._lengths[owner], positions, self.is_sampled[owner], self._has_q[owner]
            )
        )  # fmt: skip
        seeds = torch.where(independent, draft_seeds(seeds, committed), seeds)
        return gumbel_noise_of(seeds, keys, tokens) * sampled[:, None]

    def _last_rows(self, owner: np.ndarray, paths: SequenceOf[np.ndarray]) -> list[Rows]:
        return [
            Rows(self._sequences[own], draft, None, np.append(np.full(len(draft), NOT_NEEDED), row))
            for row, (own, draft) in enumerate(zip(owner.tolist(), paths, strict=True))
        ]


def draft_seeds(seeds: Tensor, committed: Tensor) -> Tensor:
    """Return the seeds of the noise of drafts in rejection mode, int64 [n]; committed: int64 [n], committed tokens."""
    return mix64(stream_seeds(seeds, Stream.DRAFT) + committed)


def _on_host(tokens: Tensor, values: Tensor, total: Tensor, q: Tensor | None, has_q: np.ndarray) -> SampledTokens:
    """Return candidates with their perturbed logits, [n, c]; total: [n, 1], the logarithm of the sum over all."""
    tokens = tokens.masked_fill(values == float("-inf"), NONE)
    return SampledTokens(tokens.cpu().numpy(), (values - total).exp().cpu().numpy(), q, has_q)
