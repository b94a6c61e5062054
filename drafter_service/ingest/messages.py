"""Chat messages, in the few forms that logs have them, as the roles and texts that chat templates expect."""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

Message = dict[str, Any]

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}


class Chat(NamedTuple):
    """What was said before an answer."""

    messages: list[Message]
    tools: list[Any] | None = None


class Reply(NamedTuple):
    """An answer that calls tools: how that reads is for the model's chat template to say."""

    message: Message


def chat_of(messages: object, tools: object = None) -> Chat | None:
    """A list of messages; None if it is none."""
    if not isinstance(messages, list) or not messages:
        return None
    read = [_message(message) for message in messages]
    known = [message for message in read if message is not None]
    return Chat(known, tools if isinstance(tools, list) else None) if len(known) == len(read) else None


def reply_of(message: object) -> str | Reply | None:
    """What an assistant's message says; None if that is nothing."""
    read = _message(message) if isinstance(message, dict) else None
    if read is None:
        return None
    return Reply(read) if read.get("tool_calls") else plain_text(read) or None


def plain_text(message: Message) -> str:
    """What a message says, without any template: its reasoning, its content, and what it gives to tools."""
    calls = message.get("tool_calls") or []
    given = [orjson.dumps(call["function"]["arguments"], default=str).decode() for call in calls]
    return "\n\n".join(filter(None, [message.get("reasoning_content", ""), message["content"], *given]))


def text_of(content: object) -> str | None:
    """The text of a message's content: a string, or a list of parts of which some are text; None if it is neither."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return None
    texts = [part.get("text") for part in content]
    return "".join(text for text in texts if isinstance(text, str))


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
    """A call with its arguments as an object: templates write them as JSON themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return None
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
