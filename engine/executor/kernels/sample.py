"""Sample the target's tokens of a step with settings on the device; nothing here waits for the device.

The kernel reads the logits once and allocates nothing of their size. On a GPU both executors sample with it, so that
they give the same tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.executor.device_state import NOT_RECORDED, DeviceState, StepInputs
from engine.executor.kernels.dispatch import Operation, kernel, next_power_of_2
from engine.sampling import noise
from engine.sampling.noise import Limits, greedy_tokens, lowest_scores
from engine.scheduling.request import GREEDY_BELOW

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 1024
"""Number of tokens that a program reads at a time."""
PROGRAMS = 512
"""Approximate number of programs per launch: a few for each multiprocessor of a large GPU."""


def sampled_tokens(
    state: DeviceState, inputs: StepInputs, logits: Tensor, *, samples: bool, max_ranked: int | None = None
) -> Tensor:
    """Return the target's token after each of the inputs' rows, int64 [N]. logits: float32 [N, V].

    samples: whether any sequence samples. max_ranked: as in `Limits`; None if no sequence truncates. The host chooses
    both, because they decide which operations run.
    """
    if not samples:
        return greedy_tokens(logits)
    slots = inputs.request_slots
    limits = None
    if max_ranked is not None:
        limits = Limits(state.top_k[slots], state.top_p[slots], state.min_p[slots], max_ranked)
    return sample_tokens(logits, state.temperatures[slots], state.seeds[slots], inputs.positions + 1, limits)


def replayed(state: DeviceState, inputs: StepInputs, tokens: Tensor) -> Tensor:
    """Return the tokens, int64 [N], replaced by recorded outputs where there are any."""
    recorded = state.history[:, 1:][inputs.request_slots, inputs.positions]
    return torch.where(recorded == NOT_RECORDED, tokens, recorded)


def _sample_kernel(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, limits: Limits | None = None
) -> Tensor:
    """Run one or more programs for each row, each for a part of the vocabulary."""
    rows, vocab = logits.shape
    block = min(BLOCK, next_power_of_2(vocab))
    parts = min(-(-PROGRAMS // max(1, rows)), -(-vocab // block))
    size = -(-vocab // (parts * block)) * block
    parts = -(-vocab // size)
    scores = torch.empty(rows, parts, device=logits.device)
    tokens = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    # Without limits the kernel does not read the floors.
    floors = scores if limits is None else lowest_scores(logits, temperatures, limits)
    _sample[(rows, parts)](
        logits, logits.stride(0), temperatures, seeds, positions, floors, scores, tokens,
        vocab, size, GREEDY_BELOW, limits is not None, block, num_warps=4,
    )  # fmt: skip
    return tokens.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0]


@kernel()
def _sample(
    logits, row_stride, temperatures, seeds, positions, floors, out_scores, out_tokens,
    vocab, size, GREEDY_BELOW: tl.constexpr, HAS_FLOORS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the token with the highest score in one part of a row; ties go to the lowest id."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    is_sampled = temperature > tl.full([], GREEDY_BELOW, tl.float64)
    divisor = tl.where(is_sampled, temperature, 1.0).to(tl.float32)
    own_key = key(tl.load(seeds + row).to(tl.uint64), tl.load(positions + row))
    end = tl.minimum((part + 1) * size, vocab)
    best = tl.full([], float("-inf"), tl.float32)
    best_token = tl.zeros([], tl.int64)
    for first in range(part * size, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        logit = tl.load(logits + row * row_stride + token, mask=token < end, other=float("-inf"))
        score = tl.div_rn(logit, divisor)
        # NaN counts as the largest score, as in PyTorch's argmax.
        score = tl.where(score == score, score, float("inf"))
        bound = score
        if is_sampled:
            if HAS_FLOORS:
                score = tl.where(score < tl.load(floors + row), float("-inf"), score)
            bound = score + gumbel_bound(own_key, token)
        # float64 noise dominates the cost: skip blocks whose bound does not exceed the best score so far.
        if tl.max(bound, axis=0) > best:
            if is_sampled:
                score += gumbel(own_key, token)
            highest = tl.max(score, axis=0)
            if highest > best:
                best = highest
                best_token = tl.min(tl.where(score == highest, token, vocab), axis=0).to(tl.int64)
    parts = tl.num_programs(1)
    tl.store(out_scores + row * parts + part, best)
    tl.store(out_tokens + row * parts + part, best_token)


sample_tokens = Operation(noise.sample_tokens, _sample_kernel)


@kernel()
def mix64(x):
    """Return SplitMix64's finalizer of x, uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@kernel()
def _stepped(x, count):
    """Return SplitMix64's state `count` increments after x, uint64."""
    return x + count.to(tl.uint64) * 0x9E3779B97F4A7C15


@kernel()
def key(seed, position):
    """Return the key that all numbers of a seed and position share, uint64."""
    return mix64(_stepped(mix64(seed), position))


@kernel()
def _number(key, index):
    """Return a random uint32."""
    return (mix64(_stepped(key, index + 1)) >> 32).to(tl.uint32)


@kernel()
def gumbel(key, index):
    """Return standard Gumbel noise, float32."""
    uniform = (_number(key, index).to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    # 1 - uniform has 33 bits, so it is exact, and its logarithm as precise as log1p's.
    return (-tl.log(-tl.log(1.0 - uniform))).to(tl.float32)


@kernel()
def gumbel_bound(key, index):
    """Return an upper bound of `gumbel`, float32, computed without float64 and close to it where the noise is large."""
    # -log(1 - u) >= u. The constant is far larger than the errors of float32, and small compared with the noise.
    return 1e-4 - tl.log((_number(key, index).to(tl.float32) + 0.5) * (1.0 / 4294967296.0))
