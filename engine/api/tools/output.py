"""Tool calls of one output, in the form of OpenAI's messages and stream chunks."""

from __future__ import annotations

import secrets
import string
from typing import Any

from engine.api.tools.formats import ToolParser
from engine.api.tools.reader import Call, Content

ID_CHARACTERS = string.ascii_letters + string.digits
ID_LENGTH = 9
"""Mistral's chat templates accept only ids of nine letters and digits. Two ids are equal with probability 1e-16."""


class CallOutput:
    """Content and tool calls of one output."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self.calls: list[dict[str, Any]] = []
        """Calls that were read."""

    def delta(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Add text, and return `content` and `tool_calls` of a chunk; {} if nothing is certain yet.

        A call is returned as a whole, because its text is content if it is malformed or cut.
        """
        known = len(self.calls)
        content = self._add(text, is_last)
        calls = [{"index": index} | call for index, call in enumerate(self.calls[known:], known)]
        delta: dict[str, Any] = {"content": content} if content else {}
        return delta | ({"tool_calls": calls} if calls else {})

    def message(self, text: str) -> dict[str, Any]:
        """Return `content` and `tool_calls` of the message with a complete output."""
        content = self._add(text, True)
        return {"content": content or None, "tool_calls": self.calls} if self.calls else {"content": content}

    def _add(self, text: str, is_last: bool) -> str:
        """Add text, append the calls that are complete, and return the new content."""
        events = self._parser.feed(text) + (self._parser.finish() if is_last else [])
        self.calls += [_as_sent(event) for event in events if isinstance(event, Call)]
        return "".join(event.text for event in events if isinstance(event, Content))


def _as_sent(call: Call) -> dict[str, Any]:
    call_id = "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
