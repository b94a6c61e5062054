"""Limits of grammars: the text that they require, compared with expressions of known length, and refusals."""

import json

import numpy as np
import pytest

from engine.sampling.grammar import Grammar, choice_grammar
from engine.sampling.grammar_limits import MAX_REQUIRED, MAX_TEXT, check_limits, required_by_regex
from ssd.errors import UserError

ELEMENTS = ["a", ".", "é", "\\d", "\\{", "\\x41", "\\u00e9", "\\p{Lu}", "\\x{1F600}", "[a-z]", "[]a]", "[^]]", "[\\]{]"]
ELEMENTS += ["[a[b-d]&&[^c]]", "[(|]"]
GROUPS = ["(", "(?:", "(?i:", "(?P<name>", "(?<name>"]


def expression(rng, depth):
    """A random expression and the number of characters that it requires in a row."""
    alternatives = [sequence(rng, depth) for _ in range(rng.integers(1, 4))]
    return "|".join(text for text, _ in alternatives), max(length for _, length in alternatives)


def sequence(rng, depth):
    text, length = "", 0
    for _ in range(rng.integers(0, 4)):
        if depth and rng.random() < 0.4:
            inner, count = expression(rng, depth - 1)
            part = f"{rng.choice(GROUPS)}{inner})"
        else:
            part, count = str(rng.choice(ELEMENTS)), 1
        repeated, times = [
            ("", 1),
            ("*", 1),
            ("+?", 1),
            ("?", 1),
            ("{3}", 3),
            ("{0,7}", 1),
            ("{2,}", 2),
            ("{4,9}?", 4),
        ][rng.integers(8)]
        text, length = text + part + repeated, length + count * times
    return text, length


@pytest.mark.parametrize("seed", range(300))
def test_text_that_an_expression_requires(seed):
    text, length = expression(np.random.default_rng(seed), 3)
    assert required_by_regex(text) == min(length, MAX_REQUIRED + 1)


@pytest.mark.parametrize(
    "text", ["(", ")", "a)b", "[", "[^", "[[a]", "{3}", "a{", "(?", "(?P<", "a{" + "9" * 5000 + "}"]
)
def test_what_is_not_an_expression_has_a_length_too(text):
    """Invalid expressions pass this check, because the library refuses them with its own message."""
    assert required_by_regex(text) >= 0


LONG = "a" * MAX_REQUIRED
SCHEMAS = [
    {"const": LONG},
    {"enum": ["a", LONG]},
    {"type": "string", "pattern": "^(a{200}){100}$"},
    {"type": "array", "items": {"const": "a"}, "minItems": 4000},
    {"type": "array", "prefixItems": [{"const": "a" * 6000}] * 3},
    {"type": "object", "properties": {"b": {"const": "a" * 9000}, "c": {"const": "a" * 9000}}, "required": ["b", "c"]},
    {"type": "object", "properties": {"b": {"anyOf": [{"type": "null"}, {"allOf": [{"const": LONG}]}]}}},
    {"type": "object", "additionalProperties": {"oneOf": [{"const": LONG}]}},
    {"type": "object", "patternProperties": {"(a{200}){100}": {}}},
    {"$defs": {"a/b": {"const": "a" * 9000}}, "prefixItems": [{"$ref": "#/%24defs/a~1b"}] * 2},
    {
        "$defs": {"a": {"const": "a" * 900}, "many": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 20}},
        "$ref": "#/$defs/many",
    },
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_schemas_that_require_long_texts_are_refused(schema):
    grammar = Grammar("json_schema", json.dumps(schema))
    assert len(grammar.text) < MAX_TEXT
    with pytest.raises(
        UserError, match=r"json_schema: it requires more than 16,384 characters in a row, .* which is the limit"
    ):
        check_limits(grammar.kind, grammar.text)


def test_schemas_that_allow_long_texts_are_not_refused():
    schema = {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}},
        "type": "object",
        "properties": {
            "text": {"type": "string", "minLength": 20_000, "maxLength": 100_000},
            "items": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 10**6},
            "step": {"multipleOf": 0.01},
            "pattern": {"const": "a" * 9000},
            "enum": {"enum": ["a" * 2000, "b" * 1000]},
        },
        "description": "a" * 9000,
    }
    check_limits("json_schema", json.dumps(schema))
    check_limits("choice", json.dumps(["a" * 9000] * 3))
    check_limits("regex", r"(\w{0,1000}a){0,1000}")


PATTERNS = {"anyOf": [{"pattern": f".*{first}{second}.*"} for first in "abcdef" for second in "vwxyz"]}
NAMED = {"$defs": {"nine": {"anyOf": PATTERNS["anyOf"][:9]}, "list": {"items": {"$ref": "#/$defs/nine"}}}}
PAIR = {"$defs": {"next": {"allOf": [{"$ref": "#/$defs/last"}] * 2}, "last": {"anyOf": [{}, {}, {}]}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [PATTERNS] * 3},
        NAMED | {"allOf": [{"$ref": "#/$defs/nine"}] * 2},
        NAMED | {"allOf": [{"$ref": "#/$defs/list"}] * 2},
        NAMED | {"$ref": "#/$defs/nine", "oneOf": PATTERNS["anyOf"][:8]},
        NAMED | {"allOf": [{"properties": {"a": {"$ref": "#/$defs/list"}}}] * 2},
        {"allOf": [{"pattern": "a" * 520}] * 2},
        PAIR | {"allOf": [{"$ref": "#/$defs/next"}] * 2},
        {"properties": {name: {"allOf": [{"anyOf": PATTERNS["anyOf"][:6]}] * 2} for name in "ab"}},
    ],
)
def test_combinations_of_many_alternatives_are_refused(schema):
    with pytest.raises(UserError, match="combining its schemas results in more than 64 alternatives"):
        check_limits("json_schema", json.dumps(schema))


def test_combinations_of_few_alternatives_are_allowed():
    nullable = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    objects = [{"properties": {f"{start}{n}": nullable for n in range(7)}} for start in "ab"]
    tree = {"allOf": [{"$ref": "#/$defs/tree"}, {"properties": {"child": {"anyOf": [{"$ref": "#"}, {}]}}}]}
    for schema in (
        {"allOf": objects},
        {"allOf": [{"pattern": "a" * 512}] * 2},
        PATTERNS | {"type": "string"},
        tree | {"$defs": {"tree": {"properties": {"next": {"$ref": "#"}}}}},
    ):
        check_limits("json_schema", json.dumps(schema))


def test_many_references_are_refused_before_all_of_them_are_followed():
    definitions = {str(n): {"properties": {name: {"$ref": f"#/$defs/{n + 1}"} for name in "ab"}} for n in range(30)}
    schema = {"$defs": definitions | {"30": {}}, "allOf": [{"$ref": "#/$defs/0"}, {}]}
    with pytest.raises(UserError, match="too many references"):
        check_limits("json_schema", json.dumps(schema))


NESTED_LISTS = {"const": 1}
for _ in range(30):
    NESTED_LISTS = {"items": NESTED_LISTS, "minItems": 1e300}


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("regex", "a" * 40_000), "regex: it has 40,000 characters; at most 32,768 are allowed"),
        (Grammar("regex", "(a{1000}){1000}"), "regex: it requires more than 16,384 characters in a row"),
        (Grammar("regex", "a{00000000099999}"), "regex: it requires more than 16,384 characters in a row"),
        (Grammar("regex", "a\\"), "regex: it ends with an incomplete escape"),
        (Grammar("json_schema", '{"pattern": "a\\\\"}'), "it ends with an incomplete escape"),
        (Grammar("regex", "(?x)a {3}"), "regex: the flag x is not supported"),
        (choice_grammar(["b", LONG + "a"]), "choice: it requires more than 16,384 characters in a row"),
        (
            Grammar(
                "json_schema",
                '{"items": {"const": "' + "a" * 6 + '"}, "minItems": 2000, "maximum": ' + "9" * 300 + "}",
            ),
            "json_schema: it requires more than 16,384 characters",
        ),
        (
            Grammar(
                "json_schema",
                json.dumps(
                    {
                        "$ref": "#/$defs/0",
                        "$defs": {str(index): {"$ref": f"#/$defs/{index + 1}"} for index in range(900)},
                    }
                ),
            ),
            "json_schema: it is nested too deep",
        ),
        (
            Grammar("json_schema", '{"multipleOf": 12345.678}'),
            "multiple of its multipleOf is at least 12,345,678, without",
        ),
        (
            Grammar("json_schema", '{"anyOf": [{"multipleOf": 997}, {"multipleOf": 1.01}]}'),
            "multipleOf is at least 100,697, without",
        ),
        (Grammar("json_schema", '{"multipleOf": 0.0012345678}'), "multipleOf is at least 12,345,678, without"),
        (Grammar("json_schema", '{"multipleOf": 1e400}'), "the number 1e400 is not finite or too large"),
        (Grammar("json_schema", '{"multipleOf": Infinity}'), "the number Infinity is not finite"),
        (Grammar("json_schema", '{"multipleOf": 1' + "0" * 400 + "}"), "the number 10000000000000000000 is not finite"),
        (Grammar("json_schema", '{"$ref": "#/anyOf/' + "9" * 5000 + '"}'), "it does not contain '#/anyOf/999"),
        (Grammar("json_schema", '{"$ref": "#name", "$anchor": "name"}'), "it does not contain '#name'"),
        (Grammar("regex", "(" * 600 + "a" + "{999999999})" * 600), "regex: it requires more than 16,384 characters"),
        (Grammar("json_schema", json.dumps(NESTED_LISTS)), "json_schema: it requires more than 16,384 characters"),
        (
            Grammar("json_schema", json.dumps({"enum": [[]] * 2000})),
            "json_schema: it has 2,002 objects and lists; at most",
        ),
        (Grammar("json_schema", json.dumps({"allOf": [{"pattern": "a"}] * 30})), "it has 29 schemas that are combined"),
        (
            Grammar("json_schema", json.dumps({"patternProperties": {str(n): {} for n in range(60)}})),
            "json_schema: it has 60 patternProperties; at most 50",
        ),
    ],
)
def test_refusals_name_the_limit(grammar, message):
    with pytest.raises(UserError) as refused:
        check_limits(grammar.kind, grammar.text)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
