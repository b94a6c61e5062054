"""Tool calls in chats: the formats in which models write them, how outputs are parsed, and how they are constrained.

Formats have the names that vLLM and SGLang give to their parsers.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.api.tool_reader import Call, Content, Event, Reader, Steps
from engine.sampling.grammar import JSON_STYLE, Grammar
from ssd.errors import UserError

if TYPE_CHECKING:  # Imports pydantic, which `--help` does without.
    from engine.api.fields import Tool

PYTHON_TAG = "<|python_tag|>"
"""Llama 3.1 may write it before a call."""
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
NAME_END = "<｜tool▁sep｜>"
"""Tokens of DeepSeek models."""
ID_CHARACTERS = string.ascii_letters + string.digits
ID_LENGTH = 9
"""Mistral's chat templates accept only ids of nine letters and digits. Two ids are equal with probability 1e-16."""


class ToolFormat(ABC):
    """One format: how its calls are written and read.

    Calls are written as `opening`, for each call `before_arguments`, the arguments as JSON and `after_arguments`, with
    `separator` between calls, and `closing`.
    """

    name: str
    """Value of --tool-call-parser."""
    markers: tuple[str, ...] = ()
    """Texts that are single tokens in the vocabularies of these models."""
    opening = ""
    before_arguments: str
    """Text in which NAME stands for the name of the tool."""
    after_arguments: str
    separator: str
    closing = ""
    template_has: tuple[str, ...] = ()
    """Texts in chat templates, in Jinja, that write calls in this format."""
    template_lacks: tuple[str, ...] = ()
    """Texts by which the templates of other formats that have them, too, are known."""

    def read(self, reader: Reader) -> Steps[None]:
        """Read a whole output. By default, calls begin with the first marker."""
        while (yield from reader.content_until(self.markers[0])):
            yield from reader.attempt(self.read_calls(reader))

    @abstractmethod
    def read_calls(self, reader: Reader) -> Steps[None]:
        """Read calls after the first marker. Raises MalformedCallError."""


class Hermes(ToolFormat):
    """Format of Hermes 2 and 3, Qwen 2.5, Qwen 3, MiMo."""

    name = "hermes"
    markers = ("<tool_call>", "</tool_call>")
    before_arguments = '<tool_call>\n{"name": "NAME", "arguments": '
    after_arguments = "}\n</tool_call>"
    separator = "\n"
    template_has = ("<tool_call>",)
    template_lacks = ("<function=", "<arg_key>")  # their arguments are no JSON

    def read_calls(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat.read_calls`."""
        yield from reader.call()
        yield from reader.close("</tool_call>")


class Llama3Json(ToolFormat):
    """Format of Llama 3.1, 3.2 and 3.3. Calls are read only from the start of an output.

    The models separate calls by semicolons or newlines.
    """

    name = "llama3_json"
    markers = (PYTHON_TAG,)
    before_arguments = '{"name": "NAME", "parameters": '
    after_arguments = "}"
    separator = "; "
    template_has = ("ipython", '"parameters": ')

    def read(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat.read`."""
        if (yield from reader.next_is(PYTHON_TAG)) or (yield from reader.sees("{")):
            yield from reader.attempt(self.read_calls(reader))
        yield from reader.content_until(None)

    def read_calls(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat.read_calls`."""
        yield from reader.call()
        while (yield from reader.next_is(";")) or (yield from reader.sees("{")):
            yield from reader.call()


class Mistral(ToolFormat):
    """Format of Mistral 7B v0.3, Mixtral 8x22B, Mistral Nemo, Ministral 8B, Mistral Small 2409 and 2501."""

    name = "mistral"
    markers = ("[TOOL_CALLS]",)
    opening = "[TOOL_CALLS]["
    before_arguments = '{"name": "NAME", "arguments": '
    after_arguments = "}"
    separator = ", "
    closing = "]"
    template_has = ("[TOOL_CALLS]",)
    template_lacks = ("[ARGS]",)  # of later versions, which write no list

    def read_calls(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat.read_calls`."""
        yield from reader.expect("[")
        yield from reader.call()
        while (yield from reader.next_is(",")):
            yield from reader.call()
        yield from reader.close("]")


class DeepSeekV3(ToolFormat):
    """Format of DeepSeek-V3 and R1."""

    name = "deepseek_v3"
    markers = (CALLS_BEGIN, CALL_BEGIN, NAME_END, CALL_END, CALLS_END)
    opening = CALLS_BEGIN
    before_arguments = f"{CALL_BEGIN}function{NAME_END}NAME\n```json\n"
    after_arguments = f"\n```{CALL_END}"
    separator = "\n"
    closing = CALLS_END
    template_has = (CALLS_BEGIN, "```json")

    def read_calls(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat.read_calls`."""
        yield from reader.expect(CALL_BEGIN)
        while True:
            yield from reader.expect("function", NAME_END)
            name = yield from reader.name_until("\n")
            yield from reader.expect("```json")
            yield from reader.arguments_of(name)
            yield from reader.close("```", CALL_END, CALLS_END)
            if not (yield from reader.next_is(CALL_BEGIN)):
                return


class DeepSeekV31(ToolFormat):
    """Format of DeepSeek-V3.1."""

    name = "deepseek_v31"
    markers = DeepSeekV3.markers
    opening = CALLS_BEGIN
    before_arguments = f"{CALL_BEGIN}NAME{NAME_END}"
    after_arguments = CALL_END
    separator = ""
    closing = CALLS_END
    template_has = (CALLS_BEGIN,)
    template_lacks = ("```json",)

    def read_calls(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat.read_calls`."""
        yield from reader.expect(CALL_BEGIN)
        while True:
            name = yield from reader.name_until(NAME_END)
            yield from reader.arguments_of(name)
            yield from reader.close(CALL_END, CALLS_END)
            if not (yield from reader.next_is(CALL_BEGIN)):
                return


FORMATS: dict[str, ToolFormat] = {
    known.name: known for known in (Hermes(), Llama3Json(), Mistral(), DeepSeekV3(), DeepSeekV31())
}
"""Formats by name."""


def recognize(template: str) -> ToolFormat | None:
    """Return the format in which a chat template, in Jinja, writes calls; None if no format or several match."""
    found = [
        known
        for known in FORMATS.values()
        if all(text in template for text in known.template_has)
        and not any(text in template for text in known.template_lacks)
    ]
    return found[0] if len(found) == 1 else None


class ToolParser:
    """Reads the calls of one output."""

    def __init__(self, form: ToolFormat, names: Collection[str], max_calls: int | None = None) -> None:
        """names: names of the tools. Calls of other names are content, and so are calls after the first `max_calls`."""
        self._reader = Reader(names, max_calls)
        self._steps = form.read(self._reader)

    def feed(self, text: str) -> list[Event]:
        """Append text and return the events that are certain."""
        self._reader.add(text)
        next(self._steps)
        return self._taken()

    def finish(self) -> list[Event]:
        """Return the remaining events, after the end of the output."""
        self._reader.has_ended = True
        for _ in self._steps:
            raise AssertionError("a format waits for text after the end")
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._reader.events = self._reader.events, []
        return events


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


def tool_grammar(
    form: ToolFormat,
    tools: Sequence[Tool],
    token_ids: Mapping[str, int],
    *,
    parallel: bool,
    answer: dict[str, Any] | None = None,
) -> Grammar:
    """Return the grammar of outputs that call one of the tools, or several if `parallel`.

    token_ids: ids of the tokens that the tokenizer has for markers of the format. answer: JSON schema of outputs that
    are allowed in place of calls.

    Raises UserError for a schema that is nested too deeply.
    """

    def literal(text: str) -> str:
        return _literal(text, form.markers, token_ids)

    calls = f"call ({literal(form.separator)} call)*" if parallel else "call"
    lines = ["start: calls" if answer is None else "start: calls | answer"]
    lines.append(f"calls: {literal(form.opening)} {calls} {literal(form.closing)}")
    lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        before = literal(form.before_arguments.replace("NAME", tool.name))
        lines.append(f"call_{index}: {before} arguments_{index} {literal(form.after_arguments)}")
        schema = _schema(tool.function.parameters | {"type": "object"}, f"tools: the schema of {tool.name}")
        lines.append(f"arguments_{index}: %json {schema}")
    if answer is not None:
        lines.append(f"answer: %json {_schema(answer, 'response_format: the schema')}")
    return Grammar("tools", "\n".join(lines))


def _literal(text: str, markers: Sequence[str], token_ids: Mapping[str, int]) -> str:
    """Return a text in Lark. Markers that are tokens are written as such, because the library requires it."""
    parts = re.split("(" + "|".join(map(re.escape, markers)) + ")", text)
    return " ".join(f"<[{token_ids[part]}]>" if part in token_ids else json.dumps(part) for part in parts if part)


def _schema(definition: dict[str, Any], name: str) -> str:
    """Return a JSON schema as text. name: its name in errors. Raises UserError."""
    style = definition.get("x-guidance", {})
    style = JSON_STYLE | style if isinstance(style, dict) else style
    try:
        return json.dumps(definition | {"x-guidance": style})
    except RecursionError:
        raise UserError(f"{name} is nested too deeply") from None
