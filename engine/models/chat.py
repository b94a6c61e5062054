"""Convert chat messages, as in OpenAI's API, to the token ids of a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drafter_service.client.chat_template import RefusedMessagesError, load_chat_template
from engine.models.tokenizer import Tokenizer
from ssd.errors import UserError

Message = Mapping[str, Any]


class ChatPrompts:
    """Chat template and tokenizer of a model folder."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Raise UserError for an unusable template. A folder without a template is valid but does not support chats."""
        self._template = load_chat_template(folder)
        self._tokenizer = tokenizer

    @property
    def tool_template(self) -> str:
        """The template for chats with tools, in Jinja; empty without a template that uses tools."""
        return "" if self._template is None else self._template.tool_source

    @property
    def takes_tools(self) -> bool:
        """Whether the template uses tools."""
        return bool(self.tool_template)

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt that the template renders.

        tools: that the model may call, as in OpenAI's API. arguments: further variables, such as `enable_thinking`.

        Raises UserError for a model without a template and for messages that its template refuses.
        """
        if self._template is None:
            raise UserError(
                "this model has no chat template; send the text of a prompt to /v1/completions, "
                "or put a chat_template.jinja into the model's folder"
            )
        normalized = [_normalize(message) for message in messages]
        try:
            return self._template.render(normalized, tools=tools, arguments=arguments)
        except RefusedMessagesError as problem:
            raise UserError(f"the model's chat template refuses the messages: {_single_line(problem)}") from None

    def tokens(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> np.ndarray:
        """Return the token ids of `text`, uint32 [N]; the template has rendered all special tokens."""
        return self._tokenizer.encode(self.text(messages, tools, arguments), add_special_tokens=False)


def _normalize(message: Message) -> dict[str, Any]:
    """Join text parts and parse the arguments of tool calls, because templates expect a string and objects."""
    normalized = {**message, "content": message.get("content") or ""}
    if isinstance(message.get("content"), list):
        normalized["content"] = "\n".join(_text_of(part) for part in message["content"])
    if isinstance(message.get("tool_calls"), list):
        normalized["tool_calls"] = [_with_parsed_arguments(call) for call in message["tool_calls"]]
    return normalized


def _text_of(part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise UserError("a message has a part that is not text; this engine accepts only text")


def _with_parsed_arguments(call: object) -> object:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        raise UserError("the arguments of a tool call are not JSON; send them as the model produced them") from None
    return {**call, "function": {**call["function"], "arguments": parsed}}


def _single_line(problem: Exception) -> str:
    return " ".join(str(problem).split()) or type(problem).__name__
