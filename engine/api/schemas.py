"""Request bodies: OpenAI's fields, vLLM's additional parameters, and our own for drafting.

Other fields are errors, see `engine.api.fields`, because ignoring a setting silently would be worse. Lists are checked
up to their first invalid element: an error for each would block the event loop for seconds.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from engine.api.fields import HARMLESS, Body, OutputFormat, StructuredOutputs, Tool
from engine.sampling.grammar import Grammar
from ssd.corpus.rollout import Rollout

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_TOOLS = 128
"""OpenAI's limit."""
PROMPT_SETTINGS = (
    "add_generation_prompt", "continue_final_message", "add_special_tokens", "documents", "reasoning_effort",
)  # fmt: skip
"""Fields of chats that `chat_template_kwargs` may have as well."""
Token = Annotated[int, Field(ge=0, lt=1 << 32)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    """Whether the last chunk contains the usage."""
    include_obfuscation: Literal[False] = False
    """OpenAI's padding, which hides the sizes of chunks from observers. Only false is accepted."""
    continuous_usage_stats: Literal[False] = False
    """vLLM's usage in every chunk. Only false is accepted."""


class WeightsRequest(Body):
    """Body of /v1/weights; see `Engine.update_weights`."""

    path: Annotated[str, Field(min_length=1)]
    """Safetensors file, or folder of such files, on the server's machine."""
    version: Annotated[int, Field(ge=0)] | None = None


class ContentPart(Body):
    """One part of a content."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """OpenAI's "predicted output": text that the output may largely repeat."""

    type: Literal["content"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        """The whole text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class RolloutFields(Body):
    """What a request samples in reinforcement learning, see `ssd.corpus.rollout.Rollout`."""

    group: str
    version: int = 0

    @model_validator(mode="after")
    def _check_ranges(self) -> RolloutFields:
        _ = self.value
        return self

    @property
    def value(self) -> Rollout:
        """The rollout. Raises ValueError for a group or a version out of its range."""
        return Rollout(self.group, self.version)


class SamplingFields(Body):
    """Fields of both endpoints."""

    prompt_field: ClassVar[str]
    """Name of the field with the prompt."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    """-1 or 0: no limit."""
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Finite, Field(ge=0.01, le=2)] | None = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[Token], Field(fail_fast=True)] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    """OpenAI's name for the end user. Requests share cached pages only with requests of the same user and salt."""
    cache_salt: str | None = None
    add_special_tokens: bool
    """Whether the tokenizer adds its special tokens to a prompt that is sent as text or as messages."""
    learn: bool = True
    """Whether the drafter may remember the output."""
    drafter: str | None = None
    """Drafters to use, among those that the server has loaded: one, several joined by +, or `none`; None: all."""
    max_draft: Annotated[int, Field(ge=0)] | None = None
    """Largest number of draft tokens per step, 0 (no drafts) to the server's --max-draft; None: the latter."""
    prediction: Prediction | None = None
    """Text that this output alone may be drafted from; it changes the speed, not the output."""
    rollout: RolloutFields | None = None
    """What the request samples in reinforcement learning; it changes the speed, not the output."""
    verification: Literal["exact", "rejection"] | None = None
    """How drafts are verified when sampling; None: the server's setting."""
    response_format: OutputFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """What the output must match, if it is not JSON."""
    return_drafted: bool = False
    """Whether to return the text in pieces that are marked as drafted or not."""
    return_token_ids: bool = False
    """Whether to return the token ids of prompts and outputs."""
    return_tokens_as_token_ids: bool = False
    """Whether log-probabilities name tokens by their ids."""

    # Accepted and not used, since they change no answer.
    store: Literal[False] = False
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_harmless(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        bias = given.get("logit_bias")
        if isinstance(bias, dict) and not all(
            type(each) in (int, float) and abs(each) <= 100 for each in bias.values()
        ):
            raise ValueError("logit_bias: its values must be numbers from -100 to 100")
        return {name: value for name, value in given.items() if value not in HARMLESS.get(name, ())}

    @model_validator(mode="after")
    def _check_combinations(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: needs stream to be true")
        if self.structured_outputs is not None and self.has_response_format:
            raise ValueError("structured_outputs: it cannot be combined with response_format; send one of them")
        return self

    @property
    def has_response_format(self) -> bool:
        """Whether the `response_format` constrains the output."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def grammar(self) -> Grammar | None:
        """Grammar that the output must match; None if it is not constrained. Raises UserError."""
        given = self.structured_outputs or self.response_format
        return None if given is None else given.grammar


class CompletionRequest(SamplingFields):
    """Body of `POST /v1/completions`."""

    prompt_field: ClassVar[str] = "prompt"

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of output tokens. 0 needs `echo`: only the prompt is returned and, with `logprobs`, scored."""
    add_special_tokens: bool = True
    echo: bool = False
    """Whether the output includes the prompt: its text and, with `logprobs`, its log-probabilities."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Number of most likely tokens to return at each position, besides the token itself; 0: only that token."""
    best_of: Annotated[int, Field(ge=1)] | None = None
    """Only `n` is accepted, because common clients send it."""

    @model_validator(mode="after")
    def _check_unsupported(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise ValueError("best_of: this server returns all outputs that it samples; leave it out, or set it to n")
        if self.echo and self.logprobs is not None and self.stream:
            raise ValueError("echo: with logprobs it cannot be streamed; set stream to false")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 needs echo to be true; otherwise it must be at least 1")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, as texts or as token ids."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given


class Message(Body):
    """One message of a chat."""

    role: Annotated[str, Field(min_length=1)]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    """None in an answer that contains only tool calls."""
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    """Tool calls of an earlier answer; the chat template renders them."""
    tool_call_id: str | None = None
    """Id of the tool call that a message with the role `tool` answers."""
    refusal: str | None = None
    """Sent by OpenAI's client with earlier answers; ignored, like `annotations`."""
    annotations: list[Any] | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs content")
        return self


class ChatRequest(SamplingFields):
    """Body of `POST /v1/chat/completions`."""

    prompt_field: ClassVar[str] = "messages"

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    add_special_tokens: bool = False
    """By default false, because the chat template writes special tokens."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the beginning of an answer; None: true unless the final message is continued."""
    continue_final_message: bool = False
    """Whether the output continues the final message, instead of answering it."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further variables for the chat template, such as `enable_thinking`; fields of `PROMPT_SETTINGS` are moved."""
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    """Variable for the chat template."""
    reasoning_effort: str | None = None
    """Variable for the chat template."""
    echo: Literal[False] = False
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: str | Tool | None = None
    """`none`, `auto` (the model decides), `required`, or the tool to call; None: `auto`."""
    parallel_tool_calls: bool = True
    """Whether an output may have several calls."""
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _take_template_settings(cls, given: Any) -> Any:
        """Move settings of the prompt from `chat_template_kwargs` to the fields that have their names."""
        settings = given.get("chat_template_kwargs") if isinstance(given, dict) else None
        if not isinstance(settings, dict):
            return given
        for name in ("messages", "tools"):
            if name in settings:
                raise ValueError(f"chat_template_kwargs: send {name} as a field of the request")
        own = {name: settings[name] for name in PROMPT_SETTINGS if settings.get(name) is not None}
        for name, value in own.items():
            if given.get(name, value) not in (value, None):
                raise ValueError(f"{name}: it differs from the value in chat_template_kwargs; send one of them")
        rest = {name: value for name, value in settings.items() if name not in PROMPT_SETTINGS}
        return given | own | {"chat_template_kwargs": rest}

    @model_validator(mode="after")
    def _check_settings(self) -> ChatRequest:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("add_generation_prompt: it must be false with continue_final_message")
        if self.continue_final_message and self.messages[-1].tool_calls:
            raise ValueError("continue_final_message: a message with tool calls cannot be continued")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens: it differs from max_completion_tokens, its newer name; send one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs to be true")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> ChatRequest:
        names = [tool.name for tool in self.tools or ()]
        if (twice := next((name for name, count in Counter(names).items() if count > 1), None)) is not None:
            raise ValueError(f"tools: two tools have the name {twice!r}")
        if isinstance(self.tool_choice, Tool):
            if self.tool_choice.name not in names:
                raise ValueError(f"tool_choice: there is no tool {self.tool_choice.name!r} in tools")
            if self.tool_choice.function.model_fields_set != {"name"}:
                raise ValueError("tool_choice: send only the name of the function; tools has its other fields")
        elif self.tool_choice not in (None, "none", "auto", "required"):
            raise ValueError("tool_choice: must be none, auto, required, or an object that names a function")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: required needs tools")
        if self.must_call and (self.has_response_format or self.structured_outputs is not None):
            raise ValueError("tool_choice: a call cannot be combined with structured output; send auto or none")
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        """Further variables for the chat template."""
        fields = {"documents": self.documents, "reasoning_effort": self.reasoning_effort}
        return self.chat_template_kwargs | {name: value for name, value in fields.items() if value is not None}

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the prompt describes."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def must_call(self) -> bool:
        """Whether the output must consist of calls."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, Tool)
