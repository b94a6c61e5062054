"""Convert chat messages, as in OpenAI's API, to the token ids of a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Return the prompt that the template renders.

        tools: that the model may call, as in OpenAI's API. arguments: further variables, such as `enable_thinking`.
        add_generation_prompt: end with the beginning of an answer. continue_final_message: end with the last message.

        Raises UserError for a model without a template, and for messages that are invalid or that it refuses.
        """
        if self._template is None:
            raise UserError(
                "this model has no chat template; send the text of a prompt to /v1/completions, "
                "or put a chat_template.jinja into the model's folder"
            )
        try:
            return self._template.render(
                messages, tools=tools, arguments=arguments, add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )  # fmt: skip
        except RefusedMessagesError as problem:
            raise UserError(str(problem)) from None

    def tokens(self, *given: Any, add_special_tokens: bool = False, **options: Any) -> np.ndarray:
        """Return the token ids of `text`, uint32 [N]; templates usually render all special tokens themselves."""
        return self._tokenizer.encode(self.text(*given, **options), add_special_tokens=add_special_tokens)

    def unused(self, names: Iterable[str], *, has_tools: bool) -> list[str]:
        """Return the names that the template does not use as variables. has_tools: whether the chat has tools."""
        if self._template is None:
            return []  # `text` raises the error.
        known = self._template.variables(has_tools=has_tools)
        return [name for name in names if name not in known]
