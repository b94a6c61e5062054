"""Runs the workload, request by request, without drafts and with the sidecar, and keeps what it saw."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.commands.demo.workload import Kind, WorkItem
from engine.engine import Engine
from engine.models.tokenizer import Tokenizer
from engine.scheduling.request import Completion, Request, SamplingParams

LOOP_TOKENS = 16
"""This many tokens in a row that repeat what stood up to `LOOP_PERIOD` tokens before them make a loop."""
LOOP_PERIOD = 64


@dataclass(frozen=True)
class Measurement:
    """One request, run both ways."""

    kind: Kind
    source: str
    prompt_tokens: int
    output_tokens: int
    corpus_tokens: int
    """Tokens that the drafter had been given to remember before this request."""
    plain_s: float
    drafted_s: float
    steps: int
    """Verify steps with drafts; without them there is one for each token."""
    drafted: int
    accepted: int
    identical: bool
    loop_tokens: int
    """Output tokens that are part of a loop."""


def measure(
    items: Sequence[WorkItem],
    tokenizer: Tokenizer,
    plain: Engine,
    drafting: Engine,
    sampling: SamplingParams,
    learned_prompt_tokens: int,
    observe: Callable[[Measurement], None],
) -> list[Measurement]:
    """Run every item with both engines, in turns, so that the machine's noise hits both."""
    warm_up = Request(tokenizer.encode(items[0].prompt), SamplingParams(max_tokens=8), learn=False)
    for engine in (plain, drafting):
        engine.generate([warm_up])
    measurements = []
    corpus_tokens = 0
    for index, item in enumerate(items):
        request = Request(tokenizer.encode(item.prompt), replace(sampling, seed=item.seed))
        in_turn = (plain, drafting) if index % 2 == 0 else (drafting, plain)
        timed = {engine: _timed(engine, request) for engine in in_turn}
        (expected, plain_s), (completion, drafted_s) = timed[plain], timed[drafting]
        measurement = Measurement(
            kind=item.kind,
            source=item.source,
            prompt_tokens=len(request.prompt),
            output_tokens=len(completion.tokens),
            corpus_tokens=corpus_tokens,
            plain_s=plain_s,
            drafted_s=drafted_s,
            steps=completion.steps,
            drafted=completion.drafted,
            accepted=completion.accepted,
            identical=bool(np.array_equal(expected.tokens, completion.tokens)),
            loop_tokens=count_loop_tokens(completion.tokens),
        )
        separator = 1
        corpus_tokens += min(len(request.prompt), learned_prompt_tokens) + len(completion.tokens) + separator
        measurements.append(measurement)
        observe(measurement)
    return measurements


def count_loop_tokens(tokens: np.ndarray) -> int:
    """How many of `tokens`, uint32 [N], are part of a loop."""
    looping = np.zeros(len(tokens), bool)
    for period in range(1, LOOP_PERIOD + 1):
        repeats = tokens[period:] == tokens[:-period]
        for end in range(LOOP_TOKENS, len(repeats) + 1):
            if repeats[end - LOOP_TOKENS : end].all():
                looping[period + end - LOOP_TOKENS : period + end] = True
    return int(looping.sum())


def _timed(engine: Engine, request: Request) -> tuple[Completion, float]:
    began = time.perf_counter()
    [completion] = engine.generate([request])
    return completion, time.perf_counter() - began
