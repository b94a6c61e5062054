"""Outputs with tool calls, and an obvious parser of whole outputs."""

import json
import re
from itertools import pairwise

from engine.api.tool_formats import CallOutput, ToolParser
from engine.api.tool_reader import Content


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


def events_of(form, parts, names, max_calls=None):
    """The events of an output that arrives in parts; adjacent texts are joined."""
    parser = ToolParser(form, set(names), max_calls)
    events = []
    for event in [event for part in parts for event in parser.feed(part)] + parser.finish():
        last = events[-1] if events else None
        if isinstance(event, Content) and isinstance(last, Content):
            events[-1] = Content(last.text + event.text)
        else:
            events.append(event)
    return events


def message_of(form, text, names, max_calls=None):
    """The content of a whole output, and its calls as pairs of a name and JSON text."""
    message = CallOutput(ToolParser(form, set(names), max_calls)).message(text)
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
    output = CallOutput(ToolParser(form, set(names), max_calls))
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


def read(name, text):
    """The content before the calls, and the calls as pairs of a name and arguments."""
    return READERS[name](text)


def _hermes(text):
    bodies = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)
    return text.split("<tool_call>")[0], _objects(bodies, "arguments")


def _llama3_json(text):
    if not text.startswith("{"):
        return text, []
    bodies, position = [], 0
    while True:
        _, end = json.JSONDecoder().raw_decode(text, position)
        bodies.append(text[position:end])
        if not text.startswith("; ", end):
            return "", _objects(bodies, "parameters")
        position = end + 2


def _mistral(text):
    content, *lists = text.split("[TOOL_CALLS]", 1)
    return content, [(call["name"], call["arguments"]) for each in lists for call in json.loads(each)]


def _deepseek(pattern):
    def read(text):
        return text.split("<｜tool▁calls▁begin｜>")[0], [
            (name, json.loads(body)) for name, body in re.findall(pattern, text, re.DOTALL)
        ]

    return read


def _objects(bodies, key):
    return [(call["name"], call[key]) for call in map(json.loads, bodies)]


READERS = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "deepseek_v3": _deepseek(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>(.*?)\n```json\n(.*?)\n```<｜tool▁call▁end｜>"
    ),
    "deepseek_v31": _deepseek("<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>"),
}
