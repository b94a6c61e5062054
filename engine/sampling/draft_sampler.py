"""Sample draft tokens from a drafter's logits, with each request's settings.

Drafts that are compared with the target's tokens use the target's own noise, so that a draft token equals the target's
wherever the two distributions agree. Drafts for rejection sampling use independent noise, which is also keyed by the
number of committed tokens: if a draft is not verified to its end, the next one has other noise at the same positions.
So a drafter may learn from all of its drafts, and whether it proposes a sampled token stays independent of that token's
noise.

On the CPU one kernel chooses the tokens of all rows, without intermediate tensors: it gives the same results as PyTorch
in a fifth of the time or less.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.drafters.drafts import DETERMINISTIC
from engine.executor.transfer import on_device
from engine.sampling.noise import Stream, gumbel_noise_of, mix64, stream_seeds
from engine.sampling.processors import NOT_NEEDED, Rows, process_logits
from engine.sampling.sampler import row_settings, scores
from engine.scheduling.sequence import Sequence
from ssd.kernels.jit import FloatRows, FloatsOut, Int, LongRows, Longs, Nothing, inline, kernel, outline
from ssd.kernels.noise import Sampling, bits_of, key_at

NONE = -1
"""Stands for a token where a request can sample fewer than were requested."""
CONSIDERED = 256
"""Number of most likely tokens that candidates are sampled from; q has no others. Noise for the whole vocabulary would
take longer than the forward pass of a small drafter. At temperature 0.8 the shipped model samples another token in
0.6 % of all cases (2.9 % with 64)."""


def choose_tokens(
    logits: Tensor, temperatures: np.ndarray, seeds: np.ndarray, positions: np.ndarray, count: int, considered: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens for each row, at most `count`, and their scores, int64 and float32 [n, c].

    See `draft_sampler.SampledTokens`. logits: float32 [n, V], on the CPU. temperatures: float32 [n], 0 for greedy.
    seeds, positions: int64 [n]. considered: number of most likely tokens that are sampled from.
    """
    rows, vocab_size = logits.shape
    array = logits.numpy()
    is_sampled = temperatures > 0
    # Softmax of greedy rows and the order of sampled ones come from vectorized functions.
    shares = np.empty((0, vocab_size), np.float32) if is_sampled.all() else logits.softmax(dim=1).numpy()
    lowest = np.full(rows, -np.inf, np.float32)
    if vocab_size > considered and is_sampled.any():
        lowest = np.partition(array, vocab_size - considered, axis=1)[:, vocab_size - considered].copy()
    count = min(count, vocab_size)
    tokens, scores = np.full((rows, count), NONE), np.zeros((rows, count), np.float32)
    _choose(array, shares, lowest, considered, temperatures, seeds, positions, tokens, scores)
    return tokens, scores


@inline
def _gumbel(bits):
    """Return the noise of a random number of 32 bits, see `engine.sampling.noise`."""
    uniform = (np.float64(bits) + 0.5) * 2.0**-32
    # The difference is exact: `uniform` has at most 33 significant bits.
    return np.float32(-np.log(-np.log(1.0 - uniform)))


@outline
def _insert_best(values, best):
    """Write the indices of the largest values above -inf to `best`, which is filled with `NONE`."""
    last = len(best) - 1
    for index in range(len(values)):
        value = values[index]
        if not value > -np.inf or (best[last] >= 0 and not value > values[best[last]]):
            continue
        rank = last
        while rank > 0 and (best[rank - 1] < 0 or value > values[best[rank - 1]]):
            best[rank] = best[rank - 1]
            rank -= 1
        best[rank] = index


@kernel(
    FloatRows, FloatRows, FloatsOut, Int, FloatsOut, Longs, Longs, LongRows, FloatRows, returns=Nothing
)  # fmt: skip
def _choose(logits, shares, lowest, considered, temperatures, seeds, positions, tokens, scores):
    vocab_size = logits.shape[1]
    limit = min(considered, vocab_size)
    kept, noisy = np.empty(limit, np.int64), np.empty(limit, np.float32)
    for row in range(len(logits)):
        values = logits[row]
        if temperatures[row] == 0:
            _insert_best(values, tokens[row])
            for rank in range(tokens.shape[1]):
                if tokens[row, rank] >= 0:
                    scores[row, rank] = shares[row, tokens[row, rank]]
            continue
        # Fewer than `limit` tokens are likelier than `bound`, and those that equal it fill the rest.
        size, bound = 0, lowest[row]
        for token in range(vocab_size):
            kept[size] = token
            size += values[token] > bound
        for token in range(vocab_size):
            if size == limit:
                break
            if values[token] == bound:
                kept[size] = token
                size += 1
        key = key_at(Sampling(True, seeds[row], np.int64(0)), positions[row])
        for index in range(size):
            noisy[index] = values[kept[index]] / temperatures[row] + _gumbel(bits_of(key, kept[index]))
        _insert_best(noisy[:size], tokens[row])
        if tokens[row, 0] < 0:
            continue
        best, total = noisy[tokens[row, 0]], 0.0
        for index in range(size):
            total += np.exp(noisy[index] - best)
        for rank in range(tokens.shape[1]):
            index = tokens[row, rank]
            if index >= 0:
                tokens[row, rank] = kept[index]
                scores[row, rank] = np.exp(noisy[index] - best) / total


class SampledTokens(NamedTuple):
    """Draft tokens for n rows of logits: c candidates each, in the order in which they are to be tried."""

    tokens: np.ndarray
    """int64 [n, c]: sampled without replacement; for a greedy request the most likely ones. `candidates.NONE` after the
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
            temperatures = self._temperatures[owner].astype(np.float32)
            chosen = choose_tokens(logits, temperatures, self._seeds[owner], positions, count, CONSIDERED)
            return SampledTokens(*chosen, None, self._has_q[owner])
        return self._sample_on_device(logits, owner, positions, count)

    def _sample_on_device(self, logits: Tensor, owner: np.ndarray, positions: np.ndarray, count: int) -> SampledTokens:
        """Sample with PyTorch, on any device and with any settings."""
        has_q = self._has_q[owner]
        if not self.is_sampled.any():
            best = logits.topk(min(count, logits.shape[1]), dim=1)
            return _on_host(best.indices, best.values, logits.logsumexp(dim=1, keepdim=True), None, has_q)
        samplings = [self._samplings[index] for index in owner.tolist()]
        scored = scores(logits, row_settings(samplings, np.ones(len(owner), np.int64), positions))
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
