"""Outputs with tool calls, and what is read from them, whole or in parts."""

import json
from itertools import pairwise

from engine.api.tool_formats import CallOutput


def written(form, calls):
    """The text of calls, pairs of a name and arguments, as the format defines it."""
    texts = [
        form.before_arguments.replace("NAME", name) + json.dumps(arguments, ensure_ascii=False) + form.after_arguments
        for name, arguments in calls
    ]
    return form.opening + form.separator.join(texts) + form.closing


def divided(text, cuts):
    """The text in parts that end at the given positions."""
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def message_of(form, text, names, max_calls=None):
    """The content of a whole output, and its calls as pairs of a name and JSON text."""
    message = CallOutput(form, set(names), max_calls).message(text)
    return message["content"], pairs_of(message.get("tool_calls", []))


def pairs_of(calls):
    """Tool calls of a message as pairs of a name and JSON text; checks the rest of them."""
    assert all(set(call) == {"id", "type", "function"} and call["type"] == "function" for call in calls)
    ids = [call["id"] for call in calls]
    assert len(set(ids)) == len(ids)
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def streamed(form, parts, names, max_calls=None):
    """The deltas of an output that arrives in parts."""
    output = CallOutput(form, set(names), max_calls)
    return [output.delta(part, is_last=False) for part in parts] + [output.delta("", is_last=True)]


def collected(deltas):
    """The message that the deltas of a stream amount to, as OpenAI's client joins them: strings are concatenated."""
    content, calls = "", []
    for delta in deltas:
        content += delta.get("content") or ""
        for part in delta.get("tool_calls", []):
            if part["index"] == len(calls):
                calls.append({"id": "", "type": part["type"], "function": {"name": "", "arguments": ""}})
            call = calls[part["index"]]
            call["id"] += part.get("id", "")
            for key, text in part["function"].items():
                call["function"][key] += text
    return content, pairs_of(calls)
