"""Chat messages, as OpenAI's API has them, to the token ids that a model sees."""

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
    """The chat template of a model folder, with its vocabulary."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Raises UserError for a template that cannot be used; a folder without one serves no chats."""
        self._template = load_chat_template(folder)
        self._tokenizer = tokenizer

    @property
    def has_template(self) -> bool:
        """Whether the model knows chats at all."""
        return self._template is not None

    def text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as the template writes it; `arguments` are further names for it, such as `enable_thinking`.

        Raises UserError, for a model without a template and for messages that its template refuses.
        """
        if self._template is None:
            raise UserError(
                "this model has no chat template; send the text of a prompt to /v1/completions, "
                "or put a chat_template.jinja into the model's folder"
            )
        plain = [_as_templates_expect(message) for message in messages]
        try:
            return self._template.render(
                plain, tools=tools, add_generation_prompt=add_generation_prompt, arguments=arguments
            )
        except RefusedMessagesError as problem:
            raise UserError(f"the model's chat template refuses the messages: {_in_a_line(problem)}") from None

    def tokens(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> np.ndarray:
        """Token ids of `text`, uint32 [N]. The template has written all special tokens, so none are added."""
        text = self.text(messages, tools=tools, add_generation_prompt=add_generation_prompt, arguments=arguments)
        return self._tokenizer.encode(text, add_special_tokens=False)


def _as_templates_expect(message: Message) -> dict[str, Any]:
    """Text in one piece, and the arguments of tool calls as objects: OpenAI's API has parts, and JSON in strings."""
    plain = dict(message)
    if isinstance(message.get("content"), list):
        plain["content"] = "\n".join(_text_of(part) for part in message["content"])
    if isinstance(message.get("tool_calls"), list):
        plain["tool_calls"] = [_with_parsed_arguments(call) for call in message["tool_calls"]]
    return plain


def _text_of(part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise UserError("a message holds a part that is no text; this engine reads text alone")


def _with_parsed_arguments(call: object) -> object:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        raise UserError("a tool call's arguments are no JSON; send them as the model wrote them") from None
    return {**call, "function": {**call["function"], "arguments": parsed}}


def _in_a_line(problem: Exception) -> str:
    return " ".join(str(problem).split()) or type(problem).__name__
