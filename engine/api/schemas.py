"""What clients send: OpenAI's requests, with vLLM's further sampling parameters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_CHOICES = 128
MAX_STOPS = 64
Token = Annotated[int, Field(ge=0, lt=1 << 32)]
Tokens = Annotated[list[Token], Field(min_length=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Body(BaseModel):
    """Unknown fields are refused: a setting that is silently ignored is worse than an error."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    """How a stream is sent."""

    include_usage: bool = False
    """Whether the last chunk says what the request took."""


class SamplingFields(Body):
    """What both kinds of requests have."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    """-1 or 0: all."""
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0, le=2)] | None = None
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
            raise ValueError("stream_options needs stream to be true")
        return self


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    prompt: str | Tokens | Annotated[list[str] | list[Tokens], Field(min_length=1, max_length=MAX_CHOICES)]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class ContentPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a chat."""

    role: Annotated[str, Field(min_length=1)]
    content: str | list[ContentPart]
    name: str | None = None


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self
