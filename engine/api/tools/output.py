"""Tool calls of one output, in the form of OpenAI's messages and stream chunks."""

from __future__ import annotations

import secrets
import string
from typing import Any

from engine.api.tools.formats import ToolParser
from engine.api.tools.reader import CallBegun, CallWithdrawn, Content, Event

ID_CHARACTERS = string.ascii_letters + string.digits
ID_LENGTH = 9
"""Mistral's chat templates accept only ids of nine letters and digits. Two ids are equal with probability 1e-16."""


class CallOutput:
    """Content and tool calls of one output."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self.calls: dict[int, dict[str, Any]] = {}
        """Calls that are complete or have begun, by index."""

    def delta(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Add text, and return `content` and `tool_calls` of a chunk; {} if nothing is certain yet."""
        content, parts = self._add(text, is_last)
        delta: dict[str, Any] = {"content": content} if content else {}
        return delta | ({"tool_calls": [{"index": index} | part for index, part in parts.items()]} if parts else {})

    def message(self, text: str) -> dict[str, Any]:
        """Return `content` and `tool_calls` of the message with a complete output."""
        content, _ = self._add(text, True)
        if not self.calls:
            return {"content": content}
        return {"content": content or None, "tool_calls": list(self.calls.values())}

    def _add(self, text: str, is_last: bool) -> tuple[str, dict[int, dict[str, Any]]]:
        """Return the new content, and the new part of each call by index."""
        content = ""
        parts: dict[int, dict[str, Any]] = {}
        for event in self._events(text, is_last):
            if isinstance(event, Content):
                content += event.text
            elif isinstance(event, CallWithdrawn):
                del self.calls[event.index]
                parts.pop(event.index, None)
            elif isinstance(event, CallBegun):
                call_id = "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))
                self.calls[event.index] = _call(call_id, event.name)
                parts[event.index] = _call(call_id, event.name)
            else:
                part = parts.setdefault(event.index, {"function": {"arguments": ""}})
                part["function"]["arguments"] += event.text
                self.calls[event.index]["function"]["arguments"] += event.text
        return content, parts

    def _events(self, text: str, is_last: bool) -> list[Event]:
        events = self._parser.feed(text)
        return events + self._parser.finish() if is_last else events


def _call(call_id: str, name: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
