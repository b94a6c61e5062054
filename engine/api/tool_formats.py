"""Tool calls in chats: the formats in which models write them, how outputs are parsed, and how they are constrained.

Formats have the names that vLLM and SGLang give to their parsers.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.api.tool_reader import Call, Reader, Steps
from engine.sampling.grammar import JSON_STYLE, Grammar
from ssd.errors import UserError

if TYPE_CHECKING:  # Imports pydantic, which `--help` does without.
    from engine.api.fields import Tool

PYTHON_TAG = "<|python_tag|>"
"""Llama 3.1 may write it before a call."""
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
NAME_END = "<｜tool▁sep｜>"
DEEPSEEK_MARKERS = (CALLS_BEGIN, CALL_BEGIN, NAME_END, CALL_END, CALLS_END)
ID_CHARACTERS = string.ascii_letters + string.digits
ID_LENGTH = 9
"""Mistral's chat templates accept only ids of nine letters and digits. Two ids are equal with probability 1e-16."""


@dataclass(frozen=True)
class ToolFormat:
    """One format: how its calls are written and read.

    Calls are written as `opening`, for each call `before_arguments`, the arguments as JSON and `after_arguments`, with
    `separator` between calls, and `closing`.
    """

    name: str
    """Value of --tool-call-parser."""
    markers: tuple[str, ...]
    """Texts that are single tokens in the vocabularies of these models."""
    read_calls: Callable[[Reader], Steps[None]]
    """Reads calls after the first marker. Raises MalformedCallError."""
    before_arguments: str
    """Text in which NAME stands for the name of the tool."""
    after_arguments: str
    separator: str
    opening: str = ""
    closing: str = ""
    template_has: tuple[str, ...] = ()
    """Texts in chat templates, in Jinja, that write calls in this format."""
    template_lacks: tuple[str, ...] = ()
    """Texts that exclude a template: they occur only in templates of other formats that also contain `template_has`."""
    only_at_start: bool = False
    """Whether calls are read only from the start of an output, with or without the first marker."""

    def read(self, reader: Reader) -> Steps[None]:
        """Read a whole output."""
        if self.only_at_start:
            if (yield from reader.next_is(self.markers[0])) or (yield from reader.sees("{")):
                yield from reader.attempt(self.read_calls(reader))
            yield from reader.content_until(None)
            return
        while (yield from reader.content_until(self.markers[0])):
            yield from reader.attempt(self.read_calls(reader))


def _read_hermes(reader: Reader) -> Steps[None]:
    yield from reader.call()
    yield from reader.close("</tool_call>")


def _read_llama(reader: Reader) -> Steps[None]:
    """Read calls between which the models write semicolons or newlines."""
    yield from reader.call()
    while (yield from reader.next_is(";")) or (yield from reader.sees("{")):
        yield from reader.call()


def _read_mistral(reader: Reader) -> Steps[None]:
    yield from reader.expect("[")
    yield from reader.call()
    while (yield from reader.next_is(",")):
        yield from reader.call()
    yield from reader.close("]")


def _read_deepseek(reader: Reader, *, before_name: Sequence[str] = (), name_end: str, fence: str = "") -> Steps[None]:
    """Read calls whose name is written before the arguments, which stand in a Markdown block if there is a `fence`."""
    yield from reader.expect(CALL_BEGIN)
    while True:
        yield from reader.expect(*before_name)
        name = yield from reader.name_until(name_end)
        yield from reader.expect(*([fence + "json"] if fence else []))
        yield from reader.arguments_of(name)
        yield from reader.close(*([fence] if fence else []), CALL_END, CALLS_END)
        if not (yield from reader.next_is(CALL_BEGIN)):
            return


KNOWN = (
    # Hermes 2 and 3, Qwen 2.5, Qwen 3, MiMo.
    ToolFormat(
        name="hermes",
        markers=("<tool_call>", "</tool_call>"),
        read_calls=_read_hermes,
        before_arguments='<tool_call>\n{"name": "NAME", "arguments": ',
        after_arguments="}\n</tool_call>",
        separator="\n",
        template_has=("<tool_call>",),
        template_lacks=("<function=", "<arg_key>"),  # Their arguments are no JSON.
    ),
    # Llama 3.1, 3.2 and 3.3.
    ToolFormat(
        name="llama3_json",
        markers=(PYTHON_TAG,),
        read_calls=_read_llama,
        before_arguments='{"name": "NAME", "parameters": ',
        after_arguments="}",
        separator="; ",
        template_has=("ipython", '"parameters": '),
        only_at_start=True,
    ),
    # Mistral 7B v0.3, Mixtral 8x22B, Mistral Nemo, Ministral 8B, Mistral Small 2409 and 2501.
    ToolFormat(
        name="mistral",
        markers=("[TOOL_CALLS]",),
        read_calls=_read_mistral,
        before_arguments='{"name": "NAME", "arguments": ',
        after_arguments="}",
        separator=", ",
        opening="[TOOL_CALLS][",
        closing="]",
        template_has=("[TOOL_CALLS]",),
        template_lacks=("[ARGS]",),  # Of later versions, which write no list.
    ),
    # DeepSeek-V3 and R1.
    ToolFormat(
        name="deepseek_v3",
        markers=DEEPSEEK_MARKERS,
        read_calls=partial(_read_deepseek, before_name=("function", NAME_END), name_end="\n", fence="```"),
        before_arguments=f"{CALL_BEGIN}function{NAME_END}NAME\n```json\n",
        after_arguments=f"\n```{CALL_END}",
        separator="\n",
        opening=CALLS_BEGIN,
        closing=CALLS_END,
        template_has=(CALLS_BEGIN, "```json"),
    ),
    # DeepSeek-V3.1.
    ToolFormat(
        name="deepseek_v31",
        markers=DEEPSEEK_MARKERS,
        read_calls=partial(_read_deepseek, name_end=NAME_END),
        before_arguments=f"{CALL_BEGIN}NAME{NAME_END}",
        after_arguments=CALL_END,
        separator="",
        opening=CALLS_BEGIN,
        closing=CALLS_END,
        template_has=(CALLS_BEGIN,),
        template_lacks=("```json",),
    ),
)
FORMATS = {known.name: known for known in KNOWN}
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


class CallOutput:
    """Reads the content and the tool calls of one output."""

    def __init__(self, form: ToolFormat, names: Collection[str], max_calls: int | None = None) -> None:
        """names: names of the tools. Calls of other names are content, and so are calls after the first `max_calls`."""
        self.calls: list[dict[str, Any]] = []
        """Calls that were read."""
        self._reader = Reader(names, max_calls)
        self._steps = form.read(self._reader)

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
        reader = self._reader
        reader.add(text, is_last=is_last)
        next(self._steps, None)
        self.calls += [_as_sent(call) for call in reader.calls[len(self.calls) :]]
        return reader.take_content()


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
