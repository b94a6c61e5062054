"""Chat messages in the formats of logs, converted to messages as in OpenAI's API, which chat templates render."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from drafter_service.client.chat_template import RefusedMessagesError, normalized

Message = dict[str, Any]

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}


class Chat(NamedTuple):
    """The messages before an answer."""

    messages: list[Message]
    tools: list[Any] | None = None
    template_arguments: Message | None = None
    """Further variables of the chat template (`chat_template_kwargs` of a request)."""


class Reply(NamedTuple):
    """An answer with tool calls, whose text depends on the model's chat template."""

    message: Message


def chat_of(messages: object, request: Mapping[str, Any] | None = None) -> Chat | None:
    """Return a list of messages as a chat; None if it is not one. `request`: the object that may have its tools."""
    if not isinstance(messages, list) or not messages:
        return None
    read = [_message(message) for message in messages]
    known = [message for message in read if message is not None]
    if len(known) < len(read):
        return None
    fields = request or {}
    tools, arguments = fields.get("tools"), fields.get("chat_template_kwargs")
    offered = tools if isinstance(tools, list) and tools else None
    return Chat(known, offered, arguments if isinstance(arguments, dict) else None)


def reply_of(message: object) -> str | Reply | None:
    """Return the contents of an assistant's message; None if there are none."""
    read = _message(message) if isinstance(message, dict) else None
    if read is None:
        return None
    return Reply(read) if read.get("tool_calls") else plain_text(read) or None


def plain_text(message: Message) -> str:
    """Return the text of a message without a template: reasoning, content and arguments of tool calls."""
    fields = normalized(message)
    calls = fields.get("tool_calls") or []
    arguments = [orjson.dumps(call["function"]["arguments"], default=str).decode() for call in calls]
    return "\n\n".join(filter(None, [fields.get("reasoning_content", ""), fields["content"], *arguments]))


def _message(message: object) -> Message | None:
    """Return a message without what only logs have; None if it is not one, or cannot be rendered."""
    if not isinstance(message, dict):
        return None
    read = {name: value for name, value in message.items() if value is not None}
    if "from" in read and "value" in read:
        read |= {"role": SHAREGPT_ROLES.get(str(read.pop("from"))), "content": read.pop("value")}
    role, content = read.get("role", "assistant"), _readable_content(read.get("content", ""))
    if not isinstance(role, str) or content is None:
        return None
    other_name = read.pop("reasoning", None)
    reasoning = read.pop("reasoning_content", other_name)
    if isinstance(reasoning, str):
        read["reasoning_content"] = reasoning
    calls = read.pop("tool_calls", None)
    if isinstance(calls, list):
        read["tool_calls"] = [call for call in calls if _is_call(call)]
    read |= {"role": role, "content": content}
    try:
        normalized(read)  # Rendering does that, and a second time would decode encoded arguments twice.
    except RefusedMessagesError:
        return None
    return read


def _readable_content(content: object) -> str | list[Message] | None:
    """Return a content without parts that are not text; None if it is neither a string nor a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return None
    return [{"type": "text", "text": part["text"]} for part in content if isinstance(part.get("text"), str)]


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
