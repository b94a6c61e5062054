"""Limits of grammars, checked before they are compiled, so that no grammar delays the steps of other requests for long.

The library llguidance bounds the work of most operations, but not the work for text without an alternative, which it
advances through at once and splits into tokens for each mask. This module limits the length of such text.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from ssd.errors import UserError

MAX_TEXT = 1 << 15
"""Largest number of characters of a grammar, because compiling delays running requests."""
MAX_REQUIRED = 1 << 14
"""Largest number of characters that a grammar may require in a row. A mask takes up to 0.3 us for each of them."""
MAX_PARTS = 1_000
"""Largest number of objects and lists in a JSON schema. Compiling takes up to 0.1 ms for each of them."""
MAX_MULTIPLE = 10_000
"""Largest common multiple of all `multipleOf` of a schema, without their trailing zeros. Compiling takes 5 us for each
unit."""
MAX_COMBINED = 8
"""Largest number of schemas that are combined with others, by `allOf` or by standing beside `$ref`, `anyOf` or `oneOf`.
The time to compile is exponential in this number."""
MAX_PATTERN_PROPERTIES = 50
"""Largest number of `patternProperties` of a schema, which are compared in pairs."""

REPEATED = re.compile(r"\{\s*(\d+)\s*(?:,\s*\d*\s*)?\}")
"""Matches a counted repetition, {n}, {n,} or {n,m}."""
GROUP = re.compile(r"\((?:\?(?:P?<\w+>|(?P<flags>[a-zA-Z-]*):?))?")
"""Matches the start of a group, or flags of the form (?i)."""
ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^}]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)?", re.DOTALL)


def check_limits(kind: str, text: str) -> None:
    """Raise UserError for a grammar that is too large; its kind and text are those of a `Grammar`."""
    if len(text) > MAX_TEXT:
        raise UserError(f"{kind}: it has {len(text):,} characters; at most {MAX_TEXT:,} are allowed")
    if kind == "regex":
        required = required_by_regex(text)
    elif kind == "choice":
        required = max(map(len, json.loads(text)))
    elif kind == "json_schema":
        required = _required_by_text(text)
    else:
        required = 0
    if required > MAX_REQUIRED:
        raise UserError(
            f"{kind}: it requires up to {required:,} characters in a row, with repetitions written out; at most "
            f"{MAX_REQUIRED:,} are allowed"
        )


def required_by_regex(pattern: str) -> int:
    """Return an upper bound of the number of characters that a regular expression requires in a row.

    {n,m} counts as n times, `*` and `?` as once. Raises UserError for the flag x, with which white space and comments
    may precede a repetition.
    """
    # For each open group: longest alternative so far, length of the current one, and length of its last element.
    groups = [[0, 0, 0]]
    at = 0
    while at < len(pattern):
        character, last = pattern[at], groups[-1]
        if (repeated := REPEATED.match(pattern, at)) is not None:
            more = last[2] * (max(1, int(repeated[1][:9])) - 1)
            last[1], last[2] = last[1] + more, last[2] + more
            at = repeated.end()
        elif character == "(":
            group = GROUP.match(pattern, at)
            assert group is not None
            if "x" in (group["flags"] or ""):
                raise UserError("regex: the flag x is not supported")
            groups.append([0, 0, 0])
            at = group.end()
        elif character == ")" and len(groups) > 1:
            longest, current, _ = groups.pop()
            _append(groups[-1], max(longest, current))
            at += 1
        elif character == "|":
            last[:] = [max(last[:2]), 0, 0]
            at += 1
        else:
            if character not in "*+?":
                _append(last, 1)
            at = _end_of_element(pattern, at)
    return max(max(group[:2]) for group in groups)


def _append(group: list[int], length: int) -> None:
    group[1] += length
    group[2] = length


def _end_of_element(pattern: str, at: int) -> int:
    """Return the end of the character, escape or class that begins at `at`."""
    if pattern[at] == "\\":
        found = ESCAPE.match(pattern, at)
        assert found is not None
        return found.end()
    if pattern[at] != "[":
        return at + 1
    # Classes may contain others. A bracket directly after their start is a member.
    depth = 0
    while at < len(pattern):
        if pattern[at] == "[":
            depth += 1
            at += 2 if pattern.startswith("^", at + 1) else 1
            at += pattern.startswith("]", at)
            continue
        depth -= pattern[at] == "]"
        at = _end_of_element(pattern, at) if pattern[at] == "\\" else at + 1
        if depth == 0:
            break
    return at


def _required_by_text(text: str) -> int:
    try:
        schema = json.loads(text, parse_int=_integer, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return 0  # The library refuses it with its own message.
    try:
        _check_schema(schema)
        return _RequiredBySchema(schema).of(schema)
    except RecursionError:
        raise UserError("json_schema: it is nested too deep, directly or through references") from None


def _integer(digits: str) -> float:
    return int(digits) if len(digits) < 20 else float(digits)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class _RequiredBySchema:
    """Upper bounds of the number of characters that parts of one JSON schema require in a row."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._references: dict[str, int] = {}

    def of(self, schema: Any) -> int:
        """Return the bound of a schema."""
        if not isinstance(schema, dict):
            return 0
        required = self._of_object(schema) + self._of_array(schema)
        if isinstance(schema.get("$ref"), str):
            required += self._of_reference(schema["$ref"])
        for name in ("anyOf", "oneOf"):
            required += max(map(self.of, _list(schema.get(name))), default=0)
        required += sum(map(self.of, _list(schema.get("allOf"))))
        required += max((len(json.dumps(value, ensure_ascii=False)) for value in _list(schema.get("enum"))), default=0)
        if "const" in schema:
            required += len(json.dumps(schema["const"], ensure_ascii=False))
        if isinstance(schema.get("pattern"), str):
            required += required_by_regex(schema["pattern"])
        return required + len("null") * (schema.get("type") == "null")

    def _of_object(self, schema: dict[str, Any]) -> int:
        """Return the bound of all required properties and the longest other property, with their names."""
        properties = _dict(schema.get("properties"))
        names = {name for name in _list(schema.get("required")) if isinstance(name, str)}
        others = [self.of(schema.get("additionalProperties"))]
        others += map(self.of, _dict(schema.get("patternProperties")).values())
        others += (_member(name) + self.of(value) for name, value in properties.items() if name not in names)
        others += map(required_by_regex, _dict(schema.get("patternProperties")))
        return sum(_member(name) + self.of(properties.get(name)) for name in names) + max(others)

    def _of_array(self, schema: dict[str, Any]) -> int:
        least = schema.get("minItems")
        count = max(1, int(least)) if isinstance(least, int | float) and least < float("inf") else 1
        first = [*_list(schema.get("prefixItems")), *_list(schema.get("items"))]
        item = max(self.of(schema.get("items")), self.of(schema.get("additionalItems")))
        return sum(len(", ") + self.of(schema) for schema in first) + (count * (len(", ") + item) if item else 0)

    def _of_reference(self, reference: str) -> int:
        """Return the bound of the schema that a reference names; 0 within itself and for an unknown reference."""
        if reference not in self._references:
            self._references[reference] = 0
            target = self._root
            for name in reference.removeprefix("#").strip("/").split("/"):
                if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                    target = target[int(name)]
                elif name:
                    target = _dict(target).get(name)
            self._references[reference] = self.of(target)
        return self._references[reference]


def _member(name: str) -> int:
    """Return the number of characters of a name in an object, with those between it, its value and other members."""
    return len(json.dumps(name, ensure_ascii=False)) + len(": , ")


def _check_schema(schema: Any) -> None:
    """Raise UserError for a JSON schema that takes long to compile."""
    parts = _parts(schema)
    objects = [part for part in parts if isinstance(part, dict)]
    for what, count, limit in (
        ("objects and lists", len(parts), MAX_PARTS),
        ("schemas that are combined with others", sum(map(_combined, objects)), MAX_COMBINED),
        (
            "patternProperties",
            sum(len(_dict(part.get("patternProperties"))) for part in objects),
            MAX_PATTERN_PROPERTIES,
        ),
    ):
        if count > limit:
            raise UserError(f"json_schema: it has {count:,} {what}; at most {limit:,} are allowed")
    common = 1
    for part in objects:
        common = math.lcm(common, _digits(part.get("multipleOf")))
        if common > MAX_MULTIPLE:
            raise UserError(
                f"json_schema: the least common multiple of its multipleOf is at least {common:,}, without trailing "
                f"zeros; at most {MAX_MULTIPLE:,} is allowed"
            )


def _parts(value: Any) -> list[Any]:
    """Return all objects and lists in a value."""
    parts, rest = [], [value]
    while rest:
        part = rest.pop()
        if isinstance(part, dict | list):
            parts.append(part)
            rest += part.values() if isinstance(part, dict) else part
    return parts


def _combined(schema: dict[str, Any]) -> int:
    """Return the number of schemas that the library has to combine with the first of an object."""
    own = any(name in schema for name in ("pattern", "format", "properties", "items", "multipleOf", "minLength"))
    beside = sum(name in schema for name in ("$ref", "anyOf", "oneOf"))
    return max(0, own + beside + len(_list(schema.get("allOf"))) - 1)


def _digits(multiple: Any) -> int:
    """Return a `multipleOf` without its sign, its point and its leading and trailing zeros; 1 if there is none."""
    if not isinstance(multiple, int | float):
        return 1
    digits = f"{multiple:f}".rstrip("0") if isinstance(multiple, float) else str(int(multiple))
    return int(digits.replace(".", "").strip("-0")[:9] or 1)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
