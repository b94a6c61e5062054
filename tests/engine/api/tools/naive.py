"""Read whole outputs with well-formed calls, by regular expressions: the slow twin of the incremental parsers."""

import json
import re


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
