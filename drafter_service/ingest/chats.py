"""Chat messages in the formats of logs, converted to the roles and texts that chat templates expect."""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

Message = dict[str, Any]

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}


class Chat(NamedTuple):
    """The messages before an answer."""

    messages: list[Message]
    tools: list[Any] | None = None


class Reply(NamedTuple):
    """An answer with tool calls, whose text depends on the model's chat template."""

    message: Message


def chat_of(messages: object, tools: object = None) -> Chat | None:
    """Return a list of messages as a chat; None if it is not one."""
    if not isinstance(messages, list) or not messages:
        return None
    read = [_message(message) for message in messages]
    known = [message for message in read if message is not None]
    return Chat(known, tools if isinstance(tools, list) else None) if len(known) == len(read) else None


def reply_of(message: object) -> str | Reply | None:
    """Return the contents of an assistant's message; None if there are none."""
    read = _message(message) if isinstance(message, dict) else None
    if read is None:
        return None
    return Reply(read) if read.get("tool_calls") else plain_text(read) or None


def plain_text(message: Message) -> str:
    """Return the text of a message without a template: reasoning, content and arguments of tool calls."""
    calls = message.get("tool_calls") or []
    arguments = [orjson.dumps(call["function"]["arguments"], default=str).decode() for call in calls]
    return "\n\n".join(filter(None, [message.get("reasoning_content", ""), message["content"], *arguments]))


def text_of(content: object) -> str | None:
    """Return the text of a message's content, a string or a list of parts; None for anything else."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return None
    texts = [part.get("text") for part in content]
    return "\n".join(text for text in texts if isinstance(text, str))


def _message(message: object) -> Message | None:
    if not isinstance(message, dict):
        return None
    if "from" in message and "value" in message:
        role, content = SHAREGPT_ROLES.get(str(message["from"])), text_of(message["value"])
    else:
        role, content = message.get("role", "assistant"), text_of(message.get("content"))
    if not isinstance(role, str) or content is None:
        return None
    read: Message = {"role": role, "content": content}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        read["reasoning_content"] = reasoning
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            read[key] = message[key]
    calls = message.get("tool_calls")
    if isinstance(calls, list) and (known := [call for call in map(_tool_call, calls) if call]):
        read["tool_calls"] = known
    return read


def _tool_call(call: object) -> Message | None:
    """Return a call with its arguments as an object, because templates convert them to JSON themselves."""
    if not isinstance(call, dict):
        return None
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return None
    known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**known, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
