"""What a caller asks for and what it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from engine.sampling.logprobs import Logprobs
from ssd.errors import UserError

if TYPE_CHECKING:  # Whoever only takes requests, such as the HTTP process, goes without PyTorch.
    from engine.models.config import ModelConfig

MOST_LOGPROBS = 20
"""Most alternatives a token, as in OpenAI's API."""
GREEDY_BELOW = 1e-5
"""Colder is greedy: float32 logits divided by such a temperature could overflow, and no draw would differ."""

LEAST_REPETITION, MOST_REPETITION = 0.01, 100
"""Of the repetition penalty; 1 is none."""


class FinishReason(StrEnum):
    """Why an output ended, in the words of OpenAI's API, which has none for a request that was cancelled."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    """Cancelled before its end; vLLM's word."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and where an output ends. Names, meanings and ranges are those of vLLM and OpenAI.

    Logits pass through: `min_tokens`, `logit_bias`, penalties, temperature, `min_p`, `top_k`, `top_p`.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    """The same seed, prompt and settings give the same output, with any drafter and in any batch."""
    top_k: int = 0
    """Draw from this many most likely tokens, and those as likely as the last of them; 0 or -1 is all."""
    top_p: float = 1.0
    """Draw from the fewest tokens that hold this share of the probability that `min_p` and `top_k` leave."""
    min_p: float = 0.0
    """Draw from tokens at least this likely, as a share of the most likely one's probability."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens in the prompt or the output."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Taken off the logits of tokens for each time that they are in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of token ids."""
    stop: tuple[str, ...] = ()
    """The output ends before the first of these that its text comes to contain."""
    stop_token_ids: tuple[int, ...] = ()
    """The output ends with the first of these, which is no part of its text."""
    ignore_eos: bool = False
    """Whether the model's end tokens are tokens like others."""
    min_tokens: int = 0
    """Before this many tokens no stop string ends the output, and no end token or one of `stop_token_ids` is chosen."""
    logprobs: int | None = None
    """Most likely tokens to report with each token of the output; 0 reports its own log-probability alone."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt but the first."""
    verification: Literal["exact", "rejection"] | None = None
    """How drafts are accepted, as in `EngineConfig`; None: as the engine is configured."""

    def __post_init__(self) -> None:
        """Raises UserError for a setting out of its range."""
        _at_least("max_tokens", self.max_tokens, 1)
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise UserError(f"seed must fit into 64 bits, not {self.seed}")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be 0 or more, not {self.temperature}")
        _at_least("top_k", self.top_k, -1)
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        _within("min_p", self.min_p, 0, 1)
        # Further out the product with a logit, over a low temperature, could be no finite number.
        _within("repetition_penalty", self.repetition_penalty, LEAST_REPETITION, MOST_REPETITION)
        _within("presence_penalty", self.presence_penalty, -2, 2)
        _within("frequency_penalty", self.frequency_penalty, -2, 2)
        for token, bias in self.logit_bias.items():
            _within(f"logit_bias of token {token}", bias, -100, 100)
        if isinstance(self.stop, str) or "" in self.stop:
            raise UserError("stop must be a list of strings, none of them empty")
        if self.verification not in (None, "exact", "rejection"):
            raise UserError(f"verification must be exact or rejection, not {self.verification}")
        _at_least("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _within(name, count, 0, MOST_LOGPROBS)

    def check(self, model: ModelConfig) -> None:
        """Raises UserError for token ids that `model` does not have."""
        for name, tokens in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in tokens:
                if not 0 <= token < model.vocab_size:
                    raise UserError(f"{name} holds the token id {token}; ids are 0 to {model.vocab_size - 1}")
        if self.min_tokens and len({*self.stop_token_ids, *model.eos_token_ids}) == model.vocab_size:
            raise UserError("stop_token_ids holds every token, so that no output of min_tokens exists")

    @cached_property
    def is_sampled(self) -> bool:
        """Whether noise decides, rather than the largest logit."""
        return self.temperature > GREEDY_BELOW

    @cached_property
    def uses_rejection(self) -> bool:
        """Whether sampled draft tokens are verified by rejection. Greedy outputs are the same in both modes."""
        return self.is_sampled and self.verification == "rejection"

    @cached_property
    def truncates(self) -> bool:
        """Whether some tokens are too unlikely to be drawn."""
        return self.is_sampled and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @cached_property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def adjusts(self) -> bool:
        """Whether logits change before the temperature."""
        return self.penalises or bool(self.logit_bias) or self.min_tokens > 0

    @cached_property
    def needs_host(self) -> bool:
        """Whether the host has to see a step's logits, or what was committed before, so that no step can be begun
        before the one before it is known. Stop strings and stop tokens are found late, and cost a step in vain.
        """
        return self.adjusts or self.logprobs is not None or self.prompt_logprobs is not None

    @cached_property
    def is_plain_greedy(self) -> bool:
        """Whether each token is that of the model's largest logit, and nothing else is asked."""
        return not (self.is_sampled or self.adjusts or self.logprobs is not None)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{name} must be at least {least}, not {value}")


def _within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise UserError(f"{name} must be {least} to {most}, not {value}")


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt to complete."""

    prompt: np.ndarray
    """uint32 [P]."""
    sampling: SamplingParams = SamplingParams()
    learn: bool = True
    """Whether the drafter may remember the output."""
    max_draft: int | None = None
    """Most draft tokens in a step, 0 for none; None: as many as the engine verifies."""
    salt: str = ""
    """Requests share keys and values of what they have in common only if they have the same salt, one for each tenant;
    without, the time to the first token would tell one tenant whether another had sent the same prompt."""
    recorded: np.ndarray | None = None
    """uint32: tokens that the target is to produce, whatever its logits say, for measuring with traffic that was
    recorded. Behind them it goes on by itself."""

    def check(self, model: ModelConfig) -> None:
        """Raises UserError for tokens or settings that `model` cannot run."""
        if len(self.prompt) == 0:
            raise UserError("the prompt is empty; give at least one token")
        for name, tokens in (("prompt", self.prompt), ("recorded output", self.recorded)):
            if tokens is None or len(tokens) == 0:
                continue
            largest = int(tokens.max())
            if largest >= model.vocab_size:
                last = model.vocab_size - 1
                raise UserError(f"the {name} holds the token id {largest}; the vocabulary ends at {last}")
        if len(self.prompt) >= model.max_positions:
            raise UserError(
                f"the prompt has {len(self.prompt)} tokens; the context window of {model.max_positions} must hold it "
                "and at least one token of output: shorten the prompt"
            )
        if self.max_draft is not None:
            _at_least("max_draft", self.max_draft, 0)
        self.sampling.check(model)


@dataclass(frozen=True, eq=False)
class Completion:
    """What became of a request."""

    tokens: np.ndarray
    """uint32 [n]: the output, up to the token that ended it if one did."""
    finish_reason: FinishReason
    steps: int
    """Verify steps that the output took; the tokens per step are `len(tokens) / steps`."""
    drafted: int
    """Draft tokens that the target verified."""
    accepted: int
    """How many of those it kept."""
    stop_reason: str | int | None = None
    """The stop string or the one of `stop_token_ids` that ended the output; None for the model's own end and for
    length."""
    text: str | None = None
    """The output's text before what ended it, if the request had stop strings; else decode `content`."""
    logprobs: Logprobs | None = None
    """Of `tokens`, if asked for."""
    prompt_logprobs: Logprobs | None = None
    """Of the prompt's tokens but the first, if asked for."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""

    @property
    def content(self) -> np.ndarray:
        """uint32: the tokens whose text is the output's, without an end token. A stop string is still in them."""
        ends_with_token = self.finish_reason is FinishReason.STOP and not isinstance(self.stop_reason, str)
        return self.tokens[:-1] if ends_with_token else self.tokens
