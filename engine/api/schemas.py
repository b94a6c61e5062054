"""What clients send: OpenAI's requests, with vLLM's further sampling parameters."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from engine.api.neutral import Body, Neutral, NeutralChat, NeutralCompletion

MAX_CHOICES = 128
MAX_STOPS = 64
Token = Annotated[int, Field(ge=0, lt=1 << 32)]
Tokens = Annotated[list[Token], Field(min_length=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class StreamOptions(Body):
    """How a stream is sent."""

    include_usage: bool = False
    """Whether the last chunk says what the request took."""
    include_obfuscation: Literal[False] = False
    continuous_usage_stats: Literal[False] = False


class SamplingFields(Neutral):
    """What both kinds of requests have."""

    prompt_field: ClassVar[str]
    """What holds the prompt."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    """-1 or 0: all."""
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Finite, Field(ge=0.01, le=2)] | None = None
    logit_bias: dict[str, Annotated[Finite, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[Token] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Whose requests share cached pages and nothing else; also OpenAI's name for it."""
    learn: bool = True
    """Whether the drafter may remember the output."""
    max_draft_tokens: Annotated[int, Field(ge=0)] | None = None
    """Most draft tokens in a step; 0: no drafts."""
    return_drafted: bool = False
    """Whether each piece of text says how much of it was drafted."""

    @model_validator(mode="after")
    def _check_stream_options(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: needs stream to be true")
        return self


class CompletionRequest(SamplingFields, NeutralCompletion):
    """`POST /v1/completions`."""

    prompt_field: ClassVar[str] = "prompt"

    prompt: str | Tokens | Annotated[list[str] | list[Tokens], Field(min_length=1, max_length=MAX_CHOICES)]
    echo: bool = False
    """Whether the text begins with the prompt; with `logprobs`, those of the prompt come first."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """0 with `echo` alone: for the log-probabilities of the prompt."""

    @model_validator(mode="after")
    def _check_max_tokens(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: must be at least 1 unless echo is true")
        if self.max_tokens == 0 and self.min_tokens:
            raise ValueError("min_tokens: must be at most max_tokens (0)")
        return self

    @model_validator(mode="after")
    def _check_neutral(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise ValueError("best_of: this server returns all that it samples, so only the value of n is supported")
        if self.echo and self.logprobs is not None and self.stream:
            raise ValueError("echo: with logprobs it cannot be streamed")
        return self


class ContentPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a chat."""

    role: Annotated[str, Field(min_length=1)]
    content: str | list[ContentPart] | None = None
    """None where an answer was nothing but calls of tools."""
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    """Calls of tools in an earlier answer; templates write them as the model did."""
    tool_call_id: str | None = None
    """In a message of the role `tool`: the call that it answers."""
    refusal: str | None = None
    """With these the official client hands an answer back: they say nothing more."""
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs content")
        return self


class ChatRequest(SamplingFields, NeutralChat):
    """`POST /v1/chat/completions`."""

    prompt_field: ClassVar[str] = "messages"

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Further names for the model's template, such as `enable_thinking`."""
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs to be true")
        return self
