"""Tools in the body of a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from engine.api.body import Body

Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
"""OpenAI's rule. None of these characters needs an escape in JSON."""


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


class FunctionName(Body):
    """The function that must be called."""

    name: str


class NamedTool(Body):
    """A `tool_choice` that requires a call of one function."""

    type: Literal["function"] = "function"
    function: FunctionName

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.function.name
