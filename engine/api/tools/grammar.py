"""Grammars of outputs that consist of tool calls, in the language of llguidance (a variant of Lark)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.api.tools.definitions import Tool
from engine.api.tools.formats import ToolFormat
from engine.sampling.grammar import JSON_STYLE, Grammar
from ssd.errors import UserError


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
