"""Compare 16-bit outputs with a reference: they may differ only where the two best logits are a near tie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.config import EngineConfig
from engine.engine import build_engine
from engine.models.decoder import Decoder
from engine.scheduling.request import Request
from ssd.baselines.none import NoDrafter

MAX_ULP = 2
"""Largest distance of the two best logits of a near tie, in units in the last place of bfloat16."""
BITS = 8
"""Number of bits of bfloat16's significand."""


class Best(NamedTuple):
    """The reference's two best tokens at a position, and the distance of their logits in units in the last place."""

    tokens: list[int]
    gap_ulp: float


class Reference(NamedTuple):
    """The output of a single request without drafts."""

    tokens: list[int]
    best: list[Best]
    """One per token."""


class Difference(NamedTuple):
    """The first position where an output differs from the reference."""

    request: int
    place: int
    gap_ulp: float
    is_near_tie: bool


def references(model: Decoder, config: EngineConfig, attention: str, submitted: Sequence[Request]) -> list[Reference]:
    """Greedy outputs of single requests; prompts run in one step. config: gives the KV cache's settings."""
    alone = EngineConfig(max_sequences=1, max_draft=0, prefix_cache=False, kv_memory_mib=config.kv_memory_mib)
    engine = build_engine(model, alone, NoDrafter(), attention=attention)
    engine._graph = None  # logits can only be read in eager steps
    runner, found = engine._executor.runner, []
    forward = runner.forward_with_states
    best: list[Best] = []

    def with_best(batch, layers):
        logits, states = forward(batch, layers)
        best.append(best_two(logits[-1]))
        return logits, states

    runner.forward_with_states = with_best
    for request in submitted:
        best.clear()
        [completion] = engine.generate([request])
        assert len(best) == len(completion.tokens)
        found.append(Reference(completion.tokens.tolist(), list(best)))
    return found


def best_two(logits: torch.Tensor) -> Best:
    values, tokens = logits.double().topk(2)
    ulp = 2.0 ** (torch.floor(torch.log2(values.abs().max())) + 1 - BITS)
    return Best(tokens.tolist(), float((values[0] - values[1]) / ulp))


def differences(got: Sequence[Sequence[int]], expected: Sequence[Reference]) -> list[Difference]:
    """The first position where each output differs; tokens after it have a different context."""
    found = []
    for request, (tokens, reference) in enumerate(zip(got, expected, strict=True)):
        assert len(tokens) == len(reference.tokens)
        differ = [place for place, token in enumerate(tokens) if token != reference.tokens[place]]
        if differ:
            best = reference.best[differ[0]]
            is_near_tie = tokens[differ[0]] in best.tokens and best.gap_ulp <= MAX_ULP
            found.append(Difference(request, differ[0], best.gap_ulp, is_near_tie))
    return found
