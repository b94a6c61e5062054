"""What the HTTP process and the engine's process tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.sampling.logprobs import Logprobs
from engine.scheduling.request import Completion, Request

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of vLLM's histogram of tokens in a step."""


@dataclass(frozen=True)
class Ready:
    """The engine has loaded its model."""

    vocab_size: int
    longest: int
    """Tokens of a prompt and its output together: what the model's context window and the KV cache hold."""
    page_size: int
    """Tokens in a page of the KV cache."""
    pages: int


@dataclass(frozen=True)
class Failed:
    """The engine could not start, or has stopped for good."""

    reason: str


@dataclass(frozen=True, eq=False)
class Begin:
    """Run a request."""

    request_id: int
    request: Request


@dataclass(frozen=True)
class Cancel:
    """Nobody wants a request's output any more."""

    request_id: int


@dataclass(frozen=True)
class Stop:
    """End the process."""


@dataclass(frozen=True)
class Refused:
    """A request cannot run."""

    request_id: int
    reason: str


@dataclass(frozen=True, eq=False)
class Produced:
    """What a step produced for a request."""

    request_id: int
    tokens: np.ndarray
    """uint32 [n]."""
    accepted: int
    """The first so many of them were drafted."""
    shown: int
    """The first so many of them are text; a token that ends the output is not."""
    logprobs: Logprobs | None = None
    """Of these tokens, if they were asked for."""


@dataclass(frozen=True)
class RequestTimes:
    """Where the time of a request went, in seconds."""

    queue: float
    """Until it was scheduled."""
    prefill: float
    """From there to its first token."""
    decode: float
    """From there to its last token."""


@dataclass(frozen=True, eq=False)
class Ended:
    """A request is over; `Produced` told of all its tokens."""

    request_id: int
    completion: Completion
    times: RequestTimes | None = None
    """None if the engine did not run it."""


@dataclass(frozen=True)
class CorpusFigures:
    """What a drafter remembers of finished requests."""

    tokens: int
    capacity: int
    """The most; beyond it the oldest are forgotten."""


@dataclass(frozen=True)
class Figures:
    """Totals since the engine began, and what it does now."""

    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    steps: int = 0
    """Of the engine."""
    step_tokens: tuple[int, ...] = ()
    """Steps by the tokens of prompts and outputs that they completed: up to each of `STEP_TOKENS`, and beyond."""
    step_tokens_sum: int = 0
    prompt_tokens: int = 0
    """Of requests that were begun."""
    cached_tokens: int = 0
    """Of those, taken from the prefix cache."""
    generated_tokens: int = 0
    sequence_steps: int = 0
    """Steps of single sequences that produced something."""
    drafts: int = 0
    """Sequence steps that verified a draft."""
    drafted: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    """How many drafts were accepted at least up to each position."""
    drafted_at: tuple[int, ...] = ()
    """How many drafts reached each position."""
    drafted_from: dict[str, int] = field(default_factory=dict)
    """`drafted` by where the tokens were found: the names of `ssd.types.Source` in small letters."""
    accepted_from: dict[str, int] = field(default_factory=dict)
    learned_tokens: int = 0
    """Of finished outputs that the drafter was given to remember."""
    corpus: CorpusFigures | None = None
    """None: the drafter has none, or has it in another process."""
    pages_used: float = 0.0
    """Part of the KV cache's pages."""
    pages: int = 0
    """Of the KV cache."""


Event = Ready | Failed | Refused | Produced | Ended | Figures
Command = Begin | Cancel | Stop
