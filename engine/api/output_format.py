"""Fields of request bodies that constrain outputs."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from engine.api.body import Body
from engine.sampling.grammar import Grammar, choice_grammar
from ssd.errors import UserError


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
