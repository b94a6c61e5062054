"""What a caller asks for and what it gets."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from engine.models.config import ModelConfig
from ssd.errors import UserError


class FinishReason(StrEnum):
    """Why an output ended, in the words of OpenAI's API, which has none for a request that was cancelled."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    """Cancelled before its end; vLLM's word."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen."""

    max_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    """The same seed, prompt and temperature give the same output, with any drafter and in any batch."""

    def __post_init__(self) -> None:
        """Raises UserError for a setting out of its range."""
        if self.max_tokens < 1:
            raise UserError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise UserError(f"seed must fit into 64 bits, not {self.seed}")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be 0 or more, not {self.temperature}")


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt to complete."""

    prompt: np.ndarray
    """uint32 [P]."""
    sampling: SamplingParams = SamplingParams()
    learn: bool = True
    """Whether the drafter may remember the output."""
    salt: str = ""
    """Requests share keys and values of what they have in common only if they have the same salt, one for each tenant;
    without, the time to the first token would tell one tenant whether another had sent the same prompt."""

    def check(self, model: ModelConfig) -> None:
        """Raises UserError for a prompt that `model` cannot run."""
        if len(self.prompt) == 0:
            raise UserError("the prompt is empty; give at least one token")
        largest = int(self.prompt.max())
        if largest >= model.vocab_size:
            raise UserError(f"the prompt holds the token id {largest}; the vocabulary ends at {model.vocab_size - 1}")
        if len(self.prompt) >= model.max_positions:
            raise UserError(
                f"the prompt has {len(self.prompt)} tokens; the context window of {model.max_positions} must hold it "
                "and at least one token of output: shorten the prompt"
            )


@dataclass(frozen=True, eq=False)
class Completion:
    """What became of a request."""

    tokens: np.ndarray
    """uint32 [n]: the output, with the end token if the model produced one."""
    finish_reason: FinishReason
    steps: int
    """Verify steps that the output took; the tokens per step are `len(tokens) / steps`."""
    drafted: int
    """Draft tokens that the target verified."""
    accepted: int
    """How many of those it kept."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
