"""Requests with their settings, and completions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from engine.drafters.sources import NO_DRAFTS, DraftCounts
from engine.sampling.grammar import Grammar
from engine.sampling.logprobs import Logprobs
from ssd.corpus.rollout import Rollout
from ssd.errors import UserError

if TYPE_CHECKING:  # The HTTP process imports this module and must not import PyTorch.
    from engine.models.config import ModelConfig

MAX_LOGPROBS = 20
"""Largest number of alternatives per token, as in OpenAI's API."""
GREEDY_BELOW = 1e-5
"""Temperatures up to this are greedy: float32 logits divided by them could overflow, and samples would not differ."""
NO_DRAFTER = "none"
"""Name that a request gives to choose no drafter."""
MIN_REPETITION, MAX_REPETITION = 0.01, 100
"""Range of the repetition penalty. Beyond it, logits divided by a low temperature could overflow."""


class FinishReason(StrEnum):
    """Why an output ended, in the terms of OpenAI's API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    """Cancelled before its end. OpenAI's API has no term for it; this is vLLM's."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and where an output ends. Names, meanings and ranges are those of vLLM and OpenAI.

    Logits pass through: `min_tokens`, `logit_bias`, penalties, `grammar`, temperature, `min_p`, `top_k`, `top_p`.
    """

    max_tokens: int = 128
    """Largest number of tokens of the output; 0, with `prompt_logprobs`: the prompt is scored and has no output."""
    temperature: float = 0.0
    """0: greedy."""
    seed: int = 0
    """With exact verification, the same seed, prompt and settings give the same output, with any drafter and in any
    batch."""
    top_k: int = 0
    """Sample from the `top_k` most likely tokens and those tied with the last of them; 0 or -1: no limit."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens with this fraction of the probability left by `min_p` and
    `top_k`."""
    min_p: float = 0.0
    """Sample from tokens whose probability is at least this fraction of the most likely token's."""
    repetition_penalty: float = 1.0
    """Divides positive logits and multiplies negative ones of tokens in the prompt or the output; 1: no penalty."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each occurrence in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of token ids."""
    stop: tuple[str, ...] = ()
    """The output ends before the first of these strings in its text."""
    stop_token_ids: tuple[int, ...] = ()
    """The output ends with the first of these tokens; its text does not include it."""
    ignore_eos: bool = False
    """Whether the output continues after the model's end tokens."""
    min_tokens: int = 0
    """Until the output has this many tokens, stop strings do not end it, and end tokens and `stop_token_ids` are not
    sampled."""
    logprobs: int | None = None
    """Number of most likely tokens to report with each output token; 0: only the token's own log-probability."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, for the prompt's tokens except the first."""
    verification: Literal["exact", "rejection"] | None = None
    """How drafts are accepted, as in `EngineConfig`; None: the engine's setting."""

    grammar: Grammar | None = None
    """What the output must match. Drafts are then verified exactly, whatever `verification` says."""

    def __post_init__(self) -> None:
        """Raise UserError for a setting out of its range."""
        _at_least("max_tokens", self.max_tokens, 1 if self.prompt_logprobs is None else 0)
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise UserError(f"seed must fit into 64 bits, not {self.seed}")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be 0 or more, not {self.temperature}")
        _at_least("top_k", self.top_k, -1)
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        _within("min_p", self.min_p, 0, 1)
        _within("repetition_penalty", self.repetition_penalty, MIN_REPETITION, MAX_REPETITION)
        _within("presence_penalty", self.presence_penalty, -2, 2)
        _within("frequency_penalty", self.frequency_penalty, -2, 2)
        for token, bias in self.logit_bias.items():
            _within(f"logit_bias of token {token}", bias, -100, 100)
        if isinstance(self.stop, str):
            raise UserError("stop must be a list of strings")
        if "" in self.stop:
            raise UserError("stop must not contain an empty string")
        if self.verification not in (None, "exact", "rejection"):
            raise UserError(f"verification must be exact or rejection, not {self.verification}")
        _at_least("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}")
        if self.grammar is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise UserError(
                f"{name}: it cannot be combined with {self.grammar.kind}, which decides where the output ends"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _within(name, count, 0, MAX_LOGPROBS)

    def check(self, model: ModelConfig) -> None:
        """Raise UserError for token ids that `model` does not have."""
        for name, tokens in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in tokens:
                if not 0 <= token < model.vocab_size:
                    raise UserError(f"{name} holds the token id {token}; ids are 0 to {model.vocab_size - 1}")
        if self.min_tokens and len({*self.stop_token_ids, *model.eos_token_ids}) == model.vocab_size:
            raise UserError("stop_token_ids: they are the whole vocabulary, so no output can reach min_tokens")

    @cached_property
    def is_sampled(self) -> bool:
        """Whether tokens are sampled; otherwise the token of the largest logit is chosen."""
        return self.temperature > GREEDY_BELOW

    @cached_property
    def uses_rejection(self) -> bool:
        """Whether sampled draft tokens are verified by rejection. Greedy outputs are the same in both modes."""
        return self.is_sampled and self.verification == "rejection" and self.grammar is None

    @cached_property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p exclude tokens."""
        return self.is_sampled and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @cached_property
    def penalizes(self) -> bool:
        """Whether logits depend on the tokens before them."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def adjusts(self) -> bool:
        """Whether logits are changed before they are divided by the temperature."""
        return self.penalizes or bool(self.logit_bias) or self.min_tokens > 0 or self.grammar is not None

    @cached_property
    def needs_host(self) -> bool:
        """Whether the host needs a step's logits, or the committed tokens before it. No step can then be launched
        before the results of the previous one are read. Stop strings and stop tokens are not among them; they are found
        one step late.
        """
        return self.adjusts or self.logprobs is not None or self.prompt_logprobs is not None

    @cached_property
    def is_plain_greedy(self) -> bool:
        """Whether each token is that of the model's largest logit, and no log-probabilities are requested."""
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
    drafters: frozenset[str] | None = None
    """Kinds of drafters that may draft for it, among those that the engine has loaded; None: all, empty: none."""
    max_draft: int | None = None
    """Largest number of draft tokens in a step, 0 to the engine's; None: the engine's."""
    salt: str = ""
    """Requests share cached keys and values only with requests of the same salt. With one salt per tenant, the time to
    the first token does not reveal whether another tenant sent the same prompt."""
    adapter: str | None = None
    """Name of the LoRA adapter that it runs with, among those of the engine; None: the model without adapters."""
    request_id: str | None = None
    """Name of its output in the corpus of drafters that have one, see `engine.api.repeats`; None: it has no name."""
    hints: np.ndarray | None = None
    """uint32: text that the output may repeat, such as the file that it edits. Drafters of text search it like the
    prompt; it is never remembered, and no other request is drafted from it."""
    rollout: Rollout | None = None
    """The problem that it samples in reinforcement learning, and the version of the weights, as evidence for drafters
    of text; None if it is no rollout."""
    recorded: np.ndarray | None = None
    """uint32: tokens that replace the target's own, for measurements with recorded traffic. The target's own tokens
    follow them."""

    @property
    def seed(self) -> int | None:
        """Seed of the noise that decides its tokens; None if they are greedy, recorded, or sampled by rejection."""
        is_keyed = self.sampling.is_sampled and not self.sampling.uses_rejection and self.recorded is None
        return self.sampling.seed if is_keyed else None

    def check(self, model: ModelConfig) -> None:
        """Raise UserError for tokens or settings that `model` cannot run."""
        if len(self.prompt) == 0:
            raise UserError("the prompt is empty; give at least one token")
        for name, tokens in (("prompt", self.prompt), ("hints", self.hints), ("recorded output", self.recorded)):
            if tokens is None or len(tokens) == 0:
                continue
            largest = int(tokens.max())
            if largest >= model.vocab_size:
                last = model.vocab_size - 1
                raise UserError(f"the {name} holds the token id {largest}; the vocabulary ends at {last}")
        if self.recorded is not None and self.sampling.grammar is not None:
            raise UserError(f"{self.sampling.grammar.kind}: a request with a recorded output cannot have it")
        self.sampling.check(model)

    def check_drafting(self, loaded: Collection[str], max_draft: int) -> None:
        """Raise UserError for drafters that are not among the `loaded` kinds, and for drafts beyond `max_draft`."""
        if self.drafters is not None and not self.drafters <= set(loaded):
            choices = [*loaded, "several of these joined by +"] if len(loaded) > 1 else list(loaded)
            allowed = ", ".join(choices) + " or " * bool(choices) + NO_DRAFTER
            unknown = ", ".join(map(repr, sorted(self.drafters - set(loaded))))
            raise UserError(f"drafter must be {allowed}; {unknown} is not loaded")
        if self.max_draft is not None:
            _within("max_draft", self.max_draft, 0, max_draft)

    def check_adapter(self, names: Collection[str]) -> None:
        """Raise UserError for an adapter that is not among `names`."""
        if self.adapter is not None and self.adapter not in names:
            known = f"there are {', '.join(sorted(names))}" if names else "this engine has none; start it with --lora"
            raise UserError(f"there is no adapter {self.adapter!r}; {known}")

    @cached_property
    def is_drafted(self) -> bool:
        """Whether drafters may draft for it."""
        return self.max_draft != 0 and (self.drafters is None or len(self.drafters) > 0)


def parse_drafters(text: str) -> frozenset[str]:
    """Return the kinds of drafters that `A`, `A+B` or `none` names. Whether they are loaded is not checked."""
    return frozenset() if text == NO_DRAFTER else frozenset(text.split("+"))


@dataclass(frozen=True, eq=False)
class Completion:
    """The output of a request, and how it ended."""

    tokens: np.ndarray
    """uint32 [n]: the output, up to the token that ended it if one did."""
    finish_reason: FinishReason
    steps: int
    """Number of verify steps; the tokens per step are `len(tokens) / steps`."""
    drafted: int
    """Number of draft tokens that the target verified."""
    accepted: int
    """Number of draft tokens that the target accepted."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the output; None if the model's end token or the length ended it."""
    text: str | None = None
    """The output's text before the stop string, if the request had any; otherwise decode `content`."""
    logprobs: Logprobs | None = None
    """Log-probabilities of `tokens`, if requested."""
    prompt_logprobs: Logprobs | None = None
    """Log-probabilities of the prompt's tokens except the first, if requested."""
    cached_tokens: int = 0
    """Number of prompt tokens whose keys and values were in the prefix cache."""
    by_source: Mapping[str, DraftCounts] = field(default_factory=dict)
    """`drafted` and `accepted` by the name of the source, see `engine.drafters.sources`."""
    predicted: DraftCounts = NO_DRAFTS
    """`drafted` and `accepted` tokens that continue the request's hints, whichever drafter proposed them."""
    is_repeat: bool = False
    """Whether it is the output of an earlier request, for which the model did not run again."""

    @property
    def content(self) -> np.ndarray:
        """uint32 [m]: the tokens without a final end or stop token. Their text still includes a stop string."""
        ends_with_token = self.finish_reason is FinishReason.STOP and not isinstance(self.stop_reason, str)
        return self.tokens[:-1] if ends_with_token else self.tokens


_MASK = (1 << 64) - 1
_MULTIPLIER = 0xBF58476D1CE4E5B9
"""The first multiplier of SplitMix64's finalizer (Steele, Lea and Flood, 2014)."""


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of sample `index` of a request, in the range of `SamplingParams.seed`.

    The first sample uses the request's own seed, so it equals the output of the same request with one sample. The
    others use SplitMix64 of seed and index, so that requests with adjacent seeds share no samples.
    """
    if index == 0:
        return seed
    mixed = _mix64(_mix64(int(seed) & _MASK) + index * _MULTIPLIER & _MASK)
    return mixed - (1 << 64) if mixed >> 63 else mixed


def _mix64(x: int) -> int:
    """Return SplitMix64's finalizer of an unsigned 64-bit number."""
    x = (x ^ x >> 30) * _MULTIPLIER & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
