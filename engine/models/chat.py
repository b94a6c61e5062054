"""Convert chat messages, as in OpenAI's API, to the token ids of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drafter_service.client.chat_template import Message, RefusedMessagesError, load_chat_template
from engine.models.tokenizer import Tokenizer
from ssd.errors import UserError


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

        Raises UserError for a model without a template, and for messages that are invalid or that it refuses.
        """
        if self._template is None:
            raise UserError(
                "this model has no chat template; send the text of a prompt to /v1/completions, "
                "or put a chat_template.jinja into the model's folder"
            )
        try:
            return self._template.render(messages, tools=tools, arguments=arguments)
        except RefusedMessagesError as problem:
            raise UserError(str(problem)) from None

    def tokens(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> np.ndarray:
        """Return the token ids of `text`, uint32 [N]; the template has rendered all special tokens."""
        return self._tokenizer.encode(self.text(messages, tools, arguments), add_special_tokens=False)
