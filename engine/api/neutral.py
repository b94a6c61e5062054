"""Parameters of OpenAI's and vLLM's APIs that this server knows by name and takes only where they change nothing.

Common clients send them with their defaults. Anything else is refused: a setting that is silently ignored is worse
than an error.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

One = Annotated[float, Field(ge=1, le=1)]
Nothing = Annotated[list[Any], Field(max_length=0)]


class Body(BaseModel):
    """Strict in types and names; null is what was not sent, as clients send it for what was not set."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class TextFormat(Body):
    """The one form of answers."""

    type: Literal["text"]


class Neutral(Body):
    """Of both kinds of requests."""

    store: Literal[False] = False
    """Nothing is kept for the caller to see again."""
    metadata: dict[str, str] | None = None
    """A note for what is stored."""
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    """A hint; prompts are compared with all others."""
    use_beam_search: Literal[False] = False
    length_penalty: One = 1.0
    early_stopping: Literal[False] = False
    skip_special_tokens: Literal[True] = True
    spaces_between_special_tokens: Literal[True] = True
    include_stop_str_in_output: Literal[False] = False
    response_format: TextFormat | None = None
    priority: Literal[0] = 0


class NeutralCompletion(Neutral):
    """Of `POST /v1/completions` alone."""

    best_of: Annotated[int, Field(ge=1)] | None = None
    """As many as `n`: all of them are returned then."""
    suffix: Literal[""] | None = None
    add_special_tokens: Literal[True] = True


class NeutralChat(Neutral):
    """Of `POST /v1/chat/completions` alone."""

    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    functions: Nothing | None = None
    function_call: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    """Without tools it has no meaning."""
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["medium"] | None = None
    echo: Literal[False] = False
    add_generation_prompt: Literal[True] = True
    continue_final_message: Literal[False] = False
