"""Parts of request bodies: constraints on outputs, tools, and fields that the server does not have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.sampling.grammar import Grammar, choice_grammar
from ssd.errors import UserError

Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
"""OpenAI's rule. None of these characters needs an escape in JSON."""
MAX_FIELDS = 256
"""Largest number of fields of an object, each of which can be an error."""


class Body(BaseModel):
    """Base of all bodies: unknown fields and wrong types are errors, and null means that a field was not sent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if len(given) > MAX_FIELDS:
            raise ValueError(f"it has {len(given):,} fields; at most {MAX_FIELDS} are accepted")
        return {name: value for name, value in given.items() if value is not None}


class JsonSchema(Body):
    """A JSON schema of OpenAI's `response_format`."""

    definition: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    """Not used, like `description` and `strict`: outputs always match the schema."""
    description: str | None = None
    strict: bool | None = None


class OutputFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> OutputFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is required if type is json_schema, and not allowed otherwise")
        return self

    @property
    def definition(self) -> dict[str, Any] | None:
        """JSON schema that outputs must match; None if they are not constrained."""
        if self.json_schema is not None:
            return self.json_schema.definition
        return {"type": "object"} if self.type == "json_object" else None

    @property
    def grammar(self) -> Grammar | None:
        """Grammar that outputs must match. Raises UserError for a schema that is nested too deeply."""
        if self.json_schema is None:
            return Grammar("json_object") if self.type == "json_object" else None
        try:
            return Grammar("json_schema", json.dumps(self.json_schema.definition))
        except RecursionError:
            raise UserError("json_schema: it is nested too deeply") from None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one of these. JSON is requested with `response_format`."""

    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1:
            raise ValueError("needs either regex or choice")
        return self

    @property
    def grammar(self) -> Grammar:
        """Grammar that outputs must match."""
        return choice_grammar(self.choice) if self.choice is not None else Grammar("regex", self.regex or "")


class Function(Body):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    """JSON schema of the arguments, of the type object; empty: any object."""
    strict: bool | None = None
    """Not used: arguments match the schema where a call is required, and are not constrained otherwise."""

    @model_validator(mode="after")
    def _check_parameters(self) -> Function:
        if self.parameters.get("type", "object") != "object":
            raise ValueError("parameters: must be a JSON schema of the type object")
        return self


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.function.name

    def as_sent(self) -> dict[str, Any]:
        """Return the fields that were sent, in OpenAI's order, for the chat template."""
        return self.model_dump(exclude_unset=True)


HARMLESS: Mapping[str, tuple[Any, ...]] = {
    # Fields of OpenAI's API.
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none",),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory",),
    "verbosity": ("medium",),
    "suffix": ("",),
    # Fields of vLLM's API.
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "truncation_side": ("left", "right"),
    "bad_words": ([],),
    "logits_processors": ([],),
    "detokenize": (True,),
    "priority": (0,),
    "include_reasoning": (True,),
    "thinking_token_budget": (-1,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "return_assistant_tokens_mask": (False,),
    "vllm_xargs": ({},),
}
"""Values of fields that the server does not have, which describe what it does anyway. Clients send them by default."""
REPLACEMENTS: Mapping[str, str] = {
    "functions": "tools",
    "function_call": "tool_choice",
    "use_beam_search": "n, the number of outputs",
    "allowed_token_ids": "logit_bias or structured_outputs",
    "bad_words": "logit_bias or structured_outputs",
    "skip_special_tokens": "return_token_ids",
    "prompt_logprobs": "echo with logprobs to /v1/completions",
    "request_id": "the header X-Request-Id",
    "guided_json": "response_format with a JSON schema",
    "guided_regex": "structured_outputs with regex",
    "guided_choice": "structured_outputs with choice",
    "structured_outputs.json": "response_format with a JSON schema",
}
"""What clients can send in place of fields that the server does not have, or only with one value."""
