"""What the HTTP process and the engine's process tell each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.logprobs import Logprobs
from engine.request import Completion, Request


@dataclass(frozen=True)
class Ready:
    """The engine has loaded its model."""

    vocab_size: int
    max_positions: int
    """Tokens of a prompt and its output together."""


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


@dataclass(frozen=True, eq=False)
class Ended:
    """A request is over; `Produced` told of all its tokens."""

    request_id: int
    completion: Completion


@dataclass(frozen=True)
class Figures:
    """Totals since the engine began, and what it does now."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    """Of the engine."""
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
    pages_used: float = 0.0
    """Part of the KV cache's pages."""
    pages: int = 0
    """Of the KV cache."""


Event = Ready | Failed | Refused | Produced | Ended | Figures
Command = Begin | Cancel | Stop
