"""Outputs in 16 bits against a reference: where they part, its two best logits must be a tie but for rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.config import EngineConfig
from engine.drafters.none import NoDrafter
from engine.engine import build_engine
from engine.models.decoder import Decoder
from engine.scheduling.request import Request

MOST_ULP = 2
"""How far apart the two best logits of a near tie are, in units in the last place of bfloat16."""
BITS = 8
"""Of bfloat16's significand."""


class Best(NamedTuple):
    """The reference's two best tokens for a place, and how many units in the last place their logits are apart."""

    tokens: list[int]
    gap_ulp: float


class Reference(NamedTuple):
    """What came of a request alone and without drafts."""

    tokens: list[int]
    best: list[Best]
    """For each of its tokens."""


class Parting(NamedTuple):
    """Where an output is no longer that of the reference."""

    request: int
    place: int
    gap_ulp: float
    is_near_tie: bool


def references(model: Decoder, config: EngineConfig, attention: str, asked: Sequence[Request]) -> list[Reference]:
    """Greedy outputs, one request after the other; prompts run in one step. config: whose cache it is."""
    alone = EngineConfig(
        max_sequences=1, max_draft=0, prefix_cache=False, kv_memory_mib=config.kv_memory_mib, kv_dtype=config.kv_dtype
    )
    engine = build_engine(model, alone, NoDrafter(), attention=attention)
    engine._graph = None  # each step runs eagerly, where its logits can be read
    runner, found = engine._executor.runner, []
    forward = runner.forward_with_states
    best: list[Best] = []

    def noted(batch, layers):
        logits, states = forward(batch, layers)
        best.append(two_best(logits[-1]))
        return logits, states

    runner.forward_with_states = noted
    for request in asked:
        best.clear()
        [completion] = engine.generate([request])
        assert len(best) == len(completion.tokens)
        found.append(Reference(completion.tokens.tolist(), list(best)))
    return found


def two_best(logits: torch.Tensor) -> Best:
    values, tokens = logits.double().topk(2)
    ulp = 2.0 ** (torch.floor(torch.log2(values.abs().max())) + 1 - BITS)
    return Best(tokens.tolist(), float((values[0] - values[1]) / ulp))


def partings(got: Sequence[Sequence[int]], expected: Sequence[Reference]) -> list[Parting]:
    """The first place where each output differs; what comes behind it follows from another text."""
    found = []
    for request, (tokens, reference) in enumerate(zip(got, expected, strict=True)):
        assert len(tokens) == len(reference.tokens)
        differ = [place for place, token in enumerate(tokens) if token != reference.tokens[place]]
        if differ:
            best = reference.best[differ[0]]
            is_near_tie = tokens[differ[0]] in best.tokens and best.gap_ulp <= MOST_ULP
            found.append(Parting(request, differ[0], best.gap_ulp, is_near_tie))
    return found
