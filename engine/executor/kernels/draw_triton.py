"""Tokens drawn by a Triton kernel, one or more programs a row; see `engine.executor.kernels.draw`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.executor.kernels.noise_triton import gumbel, gumbel_bound, key
from engine.sampling.truncation import Limits, lowest_scores
from engine.scheduling.request import GREEDY_BELOW

BLOCK = 1024
"""Tokens that a program looks at at a time."""
PROGRAMS = 512
"""Rows are cut into parts until there are about so many: a few for each of a large GPU's processors."""


def draw_tokens(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, limits: Limits | None = None
) -> Tensor:
    """See `engine.executor.kernels.draw.draw_tokens`. Each row of logits must be contiguous."""
    rows, vocab = logits.shape
    block = min(BLOCK, triton.next_power_of_2(vocab))
    parts = min(triton.cdiv(PROGRAMS, max(1, rows)), triton.cdiv(vocab, block))
    size = triton.cdiv(triton.cdiv(vocab, parts), block) * block
    parts = triton.cdiv(vocab, size)
    scores = torch.empty(rows, parts, device=logits.device)
    tokens = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    # Without limits the kernel reads no floors, whatever stands there.
    floors = scores if limits is None else lowest_scores(logits, temperatures, limits)
    _draw[(rows, parts)](
        logits, logits.stride(0), temperatures, seeds, positions, floors, scores, tokens,
        vocab, size, GREEDY_BELOW, limits is not None, block, num_warps=4,
    )  # fmt: skip
    return tokens.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0]


@triton.jit
def _draw(
    logits, row_stride, temperatures, seeds, positions, floors, out_scores, out_tokens,
    vocab, size, GREEDY_BELOW: tl.constexpr, HAS_FLOORS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best token of a part of a row; of equals the lowest."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    is_drawn = temperature > tl.full([], GREEDY_BELOW, tl.float64)
    warmth = tl.where(is_drawn, temperature, 1.0).to(tl.float32)
    own = key(tl.load(seeds + row).to(tl.uint64), tl.load(positions + row))
    end = tl.minimum((part + 1) * size, vocab)
    best = tl.full([], float("-inf"), tl.float32)
    best_token = tl.zeros([], tl.int64)
    for first in range(part * size, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        logit = tl.load(logits + row * row_stride + token, mask=token < end, other=float("-inf"))
        score = tl.div_rn(logit, warmth)
        # What is no number is the largest, as PyTorch has it.
        score = tl.where(score == score, score, float("inf"))
        bound = score
        if is_drawn:
            if HAS_FLOORS:
                score = tl.where(score < tl.load(floors + row), float("-inf"), score)
            bound = score + gumbel_bound(own, token)
        # Noise in float64 costs most, and few blocks may hold a token that is better than those before.
        if tl.max(bound, axis=0) > best:
            if is_drawn:
                score += gumbel(own, token)
            highest = tl.max(score, axis=0)
            if highest > best:
                best = highest
                best_token = tl.min(tl.where(score == highest, token, vocab), axis=0).to(tl.int64)
    parts = tl.num_programs(1)
    tl.store(out_scores + row * parts + part, best)
    tl.store(out_tokens + row * parts + part, best_token)
