"""Limits of grammars, checked before they are compiled, so that no grammar delays the steps of other requests for long.

The library llguidance bounds the work of most operations, but not the work for text without an alternative, which it
advances through at once and splits into tokens for each mask. This module limits the length of such text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import unquote

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
MAX_ALTERNATIVES = 64
"""Largest number of alternatives that result where schemas are combined, for example 64 from two `anyOf` of 8 schemas.
A pattern counts once for each `PATTERN_LENGTH` characters. Compiling takes up to 2 ms for each of them."""
PATTERN_LENGTH = 64
MAX_VISITS = 10_000
"""Largest number of schemas to visit while alternatives are counted. Repeated references are visited again, and a visit
takes 5 us."""
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
            f"{kind}: it requires more than {MAX_REQUIRED:,} characters in a row, with repetitions written out, which "
            "is the limit"
        )


def check_together(schemas: Sequence[str]) -> None:
    """Raise UserError for JSON schemas of one grammar that are together too large; each has passed `check_limits`."""
    _check_schemas([_parsed(schema) for schema in schemas])


def required_by_regex(pattern: str) -> int:
    """Return an upper bound of the number of characters that a regular expression requires in a row.

    {n,m} counts as n times, `*` and `?` as once. The bound is at most `MAX_REQUIRED` + 1. Raises UserError for an
    incomplete escape at the end, which the library ignores, and for the flag x, with which white space and comments may
    precede a repetition.
    """
    # For each open group: longest alternative so far, length of the current one, and length of its last element.
    groups = [[0, 0, 0]]
    at = 0
    while at < len(pattern):
        character, last = pattern[at], groups[-1]
        if (repeated := REPEATED.match(pattern, at)) is not None:
            more = last[2] * (max(1, int(repeated[1].lstrip("0")[:9] or 0)) - 1)
            last[1], last[2] = _limited(last[1] + more), _limited(last[2] + more)
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
    group[1] = _limited(group[1] + length)
    group[2] = length


def _limited(required: float) -> int:
    """Return a number of required characters, or one more than the limit if it is larger."""
    return int(min(required, MAX_REQUIRED + 1))


def _end_of_element(pattern: str, at: int) -> int:
    """Return the end of the character, escape or class that begins at `at`."""
    if pattern[at] == "\\":
        found = ESCAPE.match(pattern, at)
        assert found is not None
        if found[0] == "\\":
            raise UserError("regex: it ends with an incomplete escape, a single backslash")
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
        schema = _parsed(text)
    except (ValueError, RecursionError):
        return 0  # The library refuses it with its own message.
    try:
        _check_schemas([schema])
        return _RequiredBySchema(schema).of(schema)
    except RecursionError:
        raise UserError("json_schema: it is nested too deep, directly or through references") from None


def _parsed(text: str) -> Any:
    return json.loads(text, parse_int=_number, parse_float=_number, parse_constant=_number)


def _number(text: str) -> float:
    number = int(text) if text.lstrip("-").isdecimal() and len(text) < 20 else float(text)
    if not math.isfinite(number):
        raise UserError(f"json_schema: the number {text[:20]} is not finite or too large")
    return number


class _RequiredBySchema:
    """Upper bounds of the number of characters that parts of one JSON schema require in a row."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._references: dict[str, int] = {}

    def of(self, schema: Any) -> int:
        """Return the bound of a schema, at most `MAX_REQUIRED` + 1."""
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
        return _limited(required + len("null") * (schema.get("type") == "null"))

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
        count = max(1, _limited(least)) if isinstance(least, int | float) else 1
        first = [*_list(schema.get("prefixItems")), *_list(schema.get("items"))]
        item = max(self.of(schema.get("items")), self.of(schema.get("additionalItems")))
        return sum(len(", ") + self.of(schema) for schema in first) + (count * (len(", ") + item) if item else 0)

    def _of_reference(self, reference: str) -> int:
        """Return the bound of the schema that a reference names; 0 within itself."""
        if reference not in self._references:
            self._references[reference] = 0
            self._references[reference] = self.of(_target(self._root, reference))
        return self._references[reference]


class _Alternatives:
    """Numbers of alternatives that result where schemas of one grammar are combined."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._visits = 0
        self._open: set[str] = set()
        """References to the schemas around the current one."""

    def of(self, schema: Any) -> int:
        """Return the number of alternatives of a schema and its parts. Raises UserError if it exceeds the limit."""
        self._visits += 1
        if self._visits > MAX_VISITS:
            raise UserError("json_schema: it combines schemas with too many references")
        if not isinstance(schema, dict):
            return 1
        count = self._of_parts(schema)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in self._open:
            self._open.add(reference)
            count *= self.of(_target(self._root, reference))
            self._open.remove(reference)
        for name in ("anyOf", "oneOf"):
            count *= max(1, sum(map(self.of, _list(schema.get(name)))))
        for member in _list(schema.get("allOf")):
            count *= self.of(member)
        return _within_alternatives(count)

    def _of_parts(self, schema: dict[str, Any]) -> int:
        """Return the number of alternatives of a pattern, properties and items, of which each has at least one."""
        parts = [schema.get(name) for name in ("items", "additionalItems", "additionalProperties")]
        for name in ("items", "prefixItems"):
            parts += _list(schema.get(name))
        for name in ("properties", "patternProperties"):
            parts += _dict(schema.get(name)).values()
        pattern = schema.get("pattern")
        count = 1 + (len(pattern) - 1) // PATTERN_LENGTH if isinstance(pattern, str) and pattern else 1
        return count + sum(self.of(part) - 1 for part in parts if isinstance(part, dict))


def _within_alternatives(count: int) -> int:
    """Return the count. Raises UserError if it exceeds the limit."""
    if count > MAX_ALTERNATIVES:
        raise UserError(
            f"json_schema: combining its schemas results in more than {MAX_ALTERNATIVES} alternatives, "
            "which is the limit"
        )
    return count


def _target(root: Any, reference: str) -> Any:
    """Return the schema that a reference names. Raises UserError if the root does not contain it."""
    start, *names = unquote(reference).split("/")
    target = root if start == "#" else None
    for part in names:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list):
            target = target[int(name)] if name.isdecimal() and len(name) < 6 and int(name) < len(target) else None
        else:
            target = _dict(target).get(name)
    if target is None:
        raise UserError(f"json_schema: it cannot be used: it does not contain {reference[:100]!r}")
    return target


def _member(name: str) -> int:
    """Return the number of characters of a name in an object, with those between it, its value and other members."""
    return len(json.dumps(name, ensure_ascii=False)) + len(": , ")


def _check_schemas(schemas: Sequence[Any]) -> None:
    """Raise UserError for JSON schemas of one grammar that take long to compile."""
    parts = _parts(schemas)[1:]
    objects = [part for part in parts if isinstance(part, dict)]
    for what, count, limit in (
        ("objects and lists", len(parts), MAX_PARTS),
        ("schemas that are combined with others", max(map(_combined_in, schemas)), MAX_COMBINED),
        (
            "patternProperties",
            sum(len(_dict(part.get("patternProperties"))) for part in objects),
            MAX_PATTERN_PROPERTIES,
        ),
    ):
        if count > limit:
            raise UserError(f"json_schema: it has {count:,} {what}; at most {limit:,} are allowed")
    _check_multiples(objects)
    alternatives = 0
    for schema in schemas:
        counter = _Alternatives(schema)
        alternatives += sum(counter.of(part) for part in _parts(schema) if isinstance(part, dict) and _combined(part))
        _within_alternatives(alternatives)


def _check_multiples(objects: Iterable[dict[str, Any]]) -> None:
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


def _combined_in(value: Any) -> int:
    return sum(_combined(part) for part in _parts(value) if isinstance(part, dict))


def _combined(schema: dict[str, Any]) -> int:
    """Return the number of schemas that the library has to combine with the first of an object."""
    own = any(name in schema for name in ("pattern", "format", "properties", "items", "multipleOf", "minLength"))
    beside = sum(name in schema for name in ("$ref", "anyOf", "oneOf"))
    return max(0, own + beside + len(_list(schema.get("allOf"))) - 1)


def _digits(multiple: Any) -> int:
    """Return a `multipleOf` without its sign, its point and its leading and trailing zeros; 1 if there is none."""
    if not isinstance(multiple, int | float) or isinstance(multiple, bool):
        return 1
    digits = repr(multiple).partition("e")[0].replace(".", "")
    return int(digits.strip("-0")[:9] or 1)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
