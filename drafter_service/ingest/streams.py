"""Streamed responses: events of any API, and the response that their pieces make."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from drafter_service.ingest.chats import Message, as_json

Delta = tuple[int, Message, bool]
"""The number of an answer among those to one request, pieces of its message, and whether they are the last."""
EVENT = re.compile("message_|content_block_|(message|content|tool-plan|tool-call|citation)-(start|delta|end)$")
"""Types of Anthropic's events and Cohere's."""
BEDROCK = ("messageStart", "contentBlockStart", "contentBlockDelta", "contentBlockStop", "messageStop")
"""Events of Bedrock's ConverseStream."""


def deltas_of(event: object) -> list[Delta] | None:
    """Return the parts of answers in an event of a stream; None if the value is not one."""
    if not isinstance(event, dict):
        return None
    choices, kind, candidates = event.get("choices"), event.get("type"), event.get("candidates")
    if isinstance(choices, list):
        return _chunk(event, choices)
    kind = kind if isinstance(kind, str) else next((name for name in BEDROCK if isinstance(event.get(name), dict)), "")
    if kind in BEDROCK or EVENT.match(kind):
        return [(0, _event_piece(event.get(kind, event)), kind in ("message_stop", "message-end", "messageStop"))]
    if isinstance(candidates, list):  # Gemini
        return [_gemini_piece(candidate) for candidate in candidates if isinstance(candidate, dict)]
    if isinstance(event.get("done"), bool) and ("message" in event or "response" in event):  # Ollama
        fields = _object(event.get("message")) or {**event, "content": event.get("response")}
        return [(0, fields, event["done"])]
    return None


def _chunk(event: Message, choices: list[Any]) -> list[Delta] | None:
    """Return the deltas of OpenAI's choices. Unlike a chunk of a text, a whole one has its usage."""
    choices = [choice for choice in choices if isinstance(choice, dict)]
    if choices and "message" in choices[0]:
        return None
    is_text = event.get("object") == "text_completion" and not event.get("usage") and "prompt" not in event
    is_chunk = any("delta" in choice or (is_text and "finish_reason" in choice) for choice in choices)
    if not is_chunk and not str(event.get("object")).endswith(".chunk"):
        return None
    pieces = [choice["delta"] if isinstance(choice.get("delta"), dict) else choice for choice in choices]
    ends = [choice.get("finish_reason") is not None for choice in choices]
    return list(zip(map(_number, choices), pieces, ends, strict=True))


def _gemini_piece(candidate: Message) -> Delta:
    parts = _object(candidate.get("content")).get("parts")
    return _number(candidate), {"parts": parts}, either(candidate, "finishReason") is not None


def either(value: Mapping[str, Any], name: str) -> object:
    """Return a field of Gemini's API, which its libraries write in snake case."""
    snake = "".join(f"_{char.lower()}" if char.isupper() else char for char in name)
    return value.get(name, value.get(snake))


def _number(answer: Message) -> int:
    return index if isinstance(index := answer.get("index"), int) else 0


def _event_piece(event: Message) -> Message:
    """Return the pieces in an event of Anthropic, Cohere or Bedrock."""
    block = _object(event.get("content_block"))
    block = block if str(block.get("type")).endswith("tool_use") else {}  # Not results of tools of the service
    delta = _object(event.get("delta") or event.get("start") or block)
    message, thought, tool = (_object(delta.get(name)) for name in ("message", "reasoningContent", "toolUse"))
    call = {"index": event.get("index", event.get("contentBlockIndex")), **_object(message.get("tool_calls"))}
    if tool or block or "partial_json" in delta:
        arguments = delta.get("partial_json", tool.get("input"))
        call["function"] = {"name": (tool or block).get("name"), "arguments": arguments}
    thoughts = thought.get("text") or message.get("tool_plan")
    return {**delta, "reasoning": thoughts, **_object(message.get("content")), "tool_calls": [call]}


def _object(value: object) -> Message:
    """Return an object; an empty one for other values."""
    return value if isinstance(value, dict) else {}


class Streamed:
    """A response whose pieces arrive one by one."""

    def __init__(self) -> None:
        self._answers: dict[int, Message] = {}
        """By its number, the pieces of an answer: lists of texts, Gemini's parts, and calls by their index."""
        self._open: set[int] = set()
        self._whole: object = None

    def add(self, event: Mapping[str, Any]) -> bool:
        """Add the pieces of an event, and return whether it ends the response."""
        if event.get("type") == "response.completed":  # It repeats all pieces.
            self._whole = event.get("response")
            return True
        deltas = deltas_of(event) or []
        for number, fields, is_last in deltas:
            new: Message = {"content": [], "reasoning": [], "parts": [], "calls": {}}
            answer = self._answers.setdefault(number, new)
            answer["content"].append(_piece(fields, "content", "text"))
            answer["reasoning"].append(_piece(fields, "reasoning_content", "reasoning", "thinking"))
            answer["parts"] += parts if isinstance(parts := fields.get("parts"), list) else []
            calls = fields.get("tool_calls") or [{"function": fields.get("function_call")}]
            for position, call in enumerate(calls if isinstance(calls, list) else ()):
                if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
                    pieces = answer["calls"].setdefault(str(call.get("index", position)), [])
                    pieces.append((_piece(function, "name"), _piece(function, "arguments")))
            (self._open.discard if is_last else self._open.add)(number)
        return bool(deltas) and not self._open

    def response(self) -> object:
        """Return what has arrived as a response with choices."""
        return self._whole or {"choices": [{"message": _message(self._answers[key])} for key in sorted(self._answers)]}


def _message(answer: Message) -> Message:
    calls = [["".join(pieces) for pieces in zip(*call, strict=True)] for call in answer["calls"].values()]
    functions = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    texts = {name: "".join(answer[name]) for name in ("content", "reasoning")}
    return {**texts, "parts": answer["parts"], "tool_calls": functions}


def joined(events: list[Any]) -> object:
    """Return the response whose pieces are in the events of a stream; None if the values are not its events."""
    is_whole = bool(events) and isinstance(events[-1], dict) and events[-1].get("type") == "response.completed"
    if not is_whole and (not events or deltas_of(events[0]) is None):
        return None
    streamed = Streamed()
    for event in events:
        if isinstance(event, dict):
            streamed.add(event)
    return streamed.response()


def _piece(fields: Message, *names: str) -> str:
    """Return the text in the first of the fields that has one; an object is JSON."""
    value = next((fields[name] for name in names if fields.get(name)), "")
    return value if isinstance(value, str) else as_json(value) if isinstance(value, dict) else ""
