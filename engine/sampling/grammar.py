"""Constraints on outputs: JSON schemas, regular expressions, choices and tool calls.

Does not import PyTorch, because the HTTP process uses it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from ssd.errors import UserError

JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON is written on one line, as by Python's `json.dumps`. With free whitespace almost nothing would be forced, and a
weak model could produce spaces without end. A schema may choose otherwise in its field `x-guidance`."""
MAX_TEXT = 1 << 17
"""Largest number of characters of a grammar, because recent grammars are kept. Text that is not compiled, such as a
description, takes hardly any time, so no other limit bounds its memory."""


@dataclass(frozen=True)
class Grammar:
    """A constraint on an output: a JSON schema, a regular expression, or another kind."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "tools"]
    text: str = ""
    """The JSON schema, the regular expression, the list of choices as JSON, or the grammar of tool calls in the
    library's variant of Lark; empty for `json_object`."""

    def __post_init__(self) -> None:
        if len(self.text) > MAX_TEXT:
            raise UserError(f"{self.kind}: it has {len(self.text):,} characters; at most {MAX_TEXT:,} are allowed")


def choice_grammar(choices: list[str]) -> Grammar:
    """Return the grammar of outputs that are one of the given strings."""
    return Grammar("choice", json.dumps(choices, ensure_ascii=False))


def definition(grammar: Grammar) -> str:
    """Return the grammar in llguidance's own format. Raises ValueError for a schema that is not a JSON object."""
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        # The library is faster with one expression than with a grammar of alternatives, of which it allows 2,000.
        return LLMatcher.grammar_from_regex("|".join(map(re.escape, json.loads(grammar.text))))
    if grammar.kind == "tools":
        return LLMatcher.grammar_from_lark(grammar.text)
    schema = grammar.text if grammar.kind == "json_schema" else '{"type": "object"}'
    return LLMatcher.grammar_from_json_schema(schema, defaults=JSON_STYLE)
