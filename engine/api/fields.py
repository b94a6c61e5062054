"""Parts of request bodies: constraints on outputs, tools, and fields that this server does not have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.sampling.grammar import Grammar, choice_grammar
from ssd.errors import UserError

Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
"""OpenAI's rule. None of these characters needs an escape in JSON."""


class Body(BaseModel):
    """Base of all bodies: unknown fields and wrong types are errors, and null means that a field was not sent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
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
    choice: Annotated[list[str], Field(min_length=1)] | None = None

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


class Unsupported(NamedTuple):
    """A field that the server does not have."""

    reason: str
    """Why other values are refused, or what to send instead."""
    accepted: tuple[Any, ...] = ()
    """Values that are accepted, because they change nothing."""


_ONLY_TEXT = "this server reads and writes text only"
_NO_BEAMS = "there is no beam search; sample several outputs with n"
_OLDER_NAME = "this is an older name; send response_format or structured_outputs"
_NO_TRANSFER = "this server does not exchange KV caches with others"
_ONLY_RENDERED = "there is no endpoint that only renders prompts"
_SEND_FORMAT = "send response_format of the type json_schema or json_object"
_NO_GRAMMARS = "this server takes no such grammars; send regex, choice, or response_format with a JSON schema"

UNSUPPORTED: Mapping[str, Unsupported] = {
    # Fields of OpenAI's API.
    "audio": Unsupported(_ONLY_TEXT),
    "modalities": Unsupported(_ONLY_TEXT, (["text"],)),
    "functions": Unsupported("this is an older name; send tools", ([],)),
    "function_call": Unsupported("this is an older name; send tool_choice", ("none",)),
    "prompt_cache_options": Unsupported("shared prefixes are always cached; cache_salt separates them", ({},)),
    "prompt_cache_retention": Unsupported("cached prefixes are kept until their memory is needed", ("in_memory",)),
    "moderation": Unsupported("this server does not moderate"),
    "verbosity": Unsupported("this server has no such setting; ask for it in a message", ("medium",)),
    "web_search_options": Unsupported("this server does not search the web"),
    "suffix": Unsupported("this server does not insert text before a suffix", ("",)),
    # Fields of vLLM's API.
    "use_beam_search": Unsupported(_NO_BEAMS, (False,)),
    "length_penalty": Unsupported(_NO_BEAMS, (1,)),
    "early_stopping": Unsupported(_NO_BEAMS, (False,)),
    "include_stop_str_in_output": Unsupported("texts end before the stop string, which is the stop_reason", (False,)),
    "skip_special_tokens": Unsupported("texts have no special tokens; return_token_ids returns their ids", (True,)),
    "spaces_between_special_tokens": Unsupported("texts have no special tokens", (True, False)),
    "truncate_prompt_tokens": Unsupported("prompts are not cut; send a shorter one"),
    "truncation_side": Unsupported("prompts are not cut", ("left", "right")),
    "prompt_logprobs": Unsupported("send echo with logprobs to /v1/completions"),
    "allowed_token_ids": Unsupported("constrain outputs with logit_bias or structured_outputs"),
    "bad_words": Unsupported("forbid tokens with logit_bias", ([],)),
    "logits_processors": Unsupported("requests cannot run code on this server", ([],)),
    "prompt_embeds": Unsupported("send text or token ids as the prompt"),
    "detokenize": Unsupported("outputs are always text; return_token_ids adds the ids", (True,)),
    "priority": Unsupported("requests run in the order of their arrival", (0,)),
    "request_id": Unsupported("send it as the header X-Request-Id, which the response repeats"),
    "include_reasoning": Unsupported("reasoning is a part of the content", (True,)),
    "thinking_token_budget": Unsupported("this server does not limit reasoning; send max_completion_tokens", (-1,)),
    "repetition_detection": Unsupported("this server does not detect repetitions; send repetition_penalty"),
    "chat_template": Unsupported("the template of the model's folder is used; send chat_template_kwargs to change it"),
    "media_io_kwargs": Unsupported(_ONLY_TEXT, ({},)),
    "mm_processor_kwargs": Unsupported(_ONLY_TEXT, ({},)),
    "return_token_offsets": Unsupported("logprobs of completions have text_offset", (False,)),
    "return_prompt_text": Unsupported("return_token_ids returns the ids of the prompt", (False,)),
    "return_assistant_tokens_mask": Unsupported(_ONLY_RENDERED, (False,)),
    "kv_transfer_params": Unsupported(_NO_TRANSFER),
    "ec_transfer_params": Unsupported(_NO_TRANSFER),
    "vllm_xargs": Unsupported("this server has no such extensions", ({},)),
    "guided_json": Unsupported(_OLDER_NAME),
    "guided_regex": Unsupported(_OLDER_NAME),
    "guided_choice": Unsupported(_OLDER_NAME),
    "guided_grammar": Unsupported(_OLDER_NAME),
    "guided_decoding_backend": Unsupported(_OLDER_NAME),
    "guided_whitespace_pattern": Unsupported(_OLDER_NAME),
    "structured_outputs.json": Unsupported(_SEND_FORMAT),
    "structured_outputs.json_object": Unsupported(_SEND_FORMAT),
    "structured_outputs.grammar": Unsupported(_NO_GRAMMARS),
    "structured_outputs.structural_tag": Unsupported(_NO_GRAMMARS),
}
"""Fields by name, and parts of fields by their path."""
