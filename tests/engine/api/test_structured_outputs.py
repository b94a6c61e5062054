"""Outputs that match a JSON schema, a regular expression or one of several choices, over HTTP."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.api.server import build_engine_from
from engine.commands.options import EngineOptions
from engine.config import EngineConfig
from tests.engine.api.serving import MODEL

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "state": {"enum": ["active", "inactive"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "state", "age"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
ROUTES = {"completions": {"prompt": "def f(x):"}, "chat/completions": {"messages": [{"role": "user", "content": "x"}]}}


def post(http, route, **fields):
    return http.post(f"/v1/{route}", json={"model": MODEL, "max_tokens": 64, "seed": 1} | ROUTES[route] | fields)


def text_of(http, route, **fields):
    """The output, which must have ended by itself."""
    answer = post(http, route, **fields)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["text"] if route == "completions" else choice["message"]["content"]


def check(text):
    value = json.loads(text)
    assert list(value) == ["name", "state", "age"]
    assert value["state"] in ("active", "inactive")
    assert 0 <= value["age"] <= 99
    assert text == json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("route", ROUTES)
def test_outputs_match_a_schema(http, route):
    check(text_of(http, route, response_format=JSON_SCHEMA))


def test_outputs_match_a_regular_expression_or_a_choice(http):
    assert re.fullmatch(
        "[a-z]{3}-[0-9]{2}", text_of(http, "completions", structured_outputs={"regex": "[a-z]{3}-[0-9]{2}"})
    )
    choices = ['say "yes"', "né\n", "no"]
    assert text_of(http, "completions", structured_outputs={"choice": choices}) in choices


def test_any_json_object(http):
    """The model does not know JSON, so that only some of its objects end."""
    fields = {"response_format": {"type": "json_object"}, "n": 16, "temperature": 1.5}
    choices = post(http, "completions", **fields).json()["choices"]
    assert all(choice["text"].startswith("{") for choice in choices)
    ended = [choice["text"] for choice in choices if choice["finish_reason"] == "stop"]
    assert ended
    assert all(isinstance(json.loads(text), dict) for text in ended)


def test_max_tokens_may_cut_an_output(http):
    [choice] = post(http, "completions", response_format=JSON_SCHEMA, max_tokens=3).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ('{"name', "length")


def test_free_text_may_be_asked_for(http):
    assert (
        post(http, "completions", response_format={"type": "text"}, structured_outputs={"choice": ["a"]}).json()[
            "choices"
        ][0]["text"]
        == "a"
    )


JSON = "response_format.json_schema"


def schema_of(definition):
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": definition}}}


@pytest.mark.parametrize("drafter", ["ssd", "none"])
def test_drafts_do_not_change_outputs_and_forced_tokens_are_reported(http, drafter):
    fields = {"response_format": JSON_SCHEMA, "temperature": 0.8, "n": 4, "seed": 7}
    plain, drafted = (
        post(http, "completions", **fields, **more).json() for more in ({"max_draft": 0}, {"drafter": drafter})
    )
    assert [choice["text"] for choice in drafted["choices"]] == [choice["text"] for choice in plain["choices"]]
    forced = drafted["usage"]["draft"]["by_source"].get("grammar")
    assert (forced is None) == (drafter == "none")
    if forced is not None:
        assert forced["accepted_tokens"] > 20


OBJECTS = [{"properties": {f"{n}": {"const": value} for n in range(60)}} for value in range(12)]
"""Objects with the same optional properties and other values; the library follows all of them at once."""
LIMITED = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "minLength": 40, "maxLength": 40},
        "object": {"anyOf": [each | {"type": "object", "additionalProperties": False} for each in OBJECTS]},
    },
    "required": ["text", "object"],
    "additionalProperties": False,
}
"""The library cannot continue an output at its second property."""


@pytest.mark.parametrize("fields", [{}, {"max_draft": 0}, {"drafter": "none"}], ids=str)
def test_an_output_that_reaches_a_limit_of_the_library_ends_with_an_error(http, fields):
    """Other requests are not affected, neither in the same batch nor later."""
    message = (
        f"{JSON}: the output cannot be continued, because llguidance has reached one of its limits: Parser Error: "
        "Current row has"
    )
    fields = schema_of(LIMITED) | {"temperature": 1.5} | fields
    with ThreadPoolExecutor() as threads:
        others = [threads.submit(text_of, http, "completions", response_format=JSON_SCHEMA) for _ in range(2)]
        answers = [post(http, "completions", **fields) for _ in range(2)]
        for other in others:
            check(other.result())
    for answer in answers:
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["message"].startswith(message)
        assert error["message"].endswith("; use smaller repetitions, or fewer alternatives with the same beginning")
        assert "\n" not in error["message"]
        assert error["param"] == JSON
    *parts, last, done = [
        line[6:] for line in post(http, "completions", stream=True, **fields).text.splitlines() if line
    ]
    assert len(parts) > 5
    assert (json.loads(last)["error"], done) == (error, "[DONE]")
    check(text_of(http, "completions", response_format=JSON_SCHEMA))


@pytest.mark.parametrize("depth", [100, 400, 900])
def test_deeply_nested_schemas_are_answered(http, depth):
    """The engine process survives them."""
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    answer = post(http, "completions", **schema_of(schema), max_tokens=2)
    assert answer.status_code in (200, 400)
    assert http.get("/health").status_code == 200


def test_the_server_reads_the_tokenizer_before_the_first_grammar(folder):
    options = EngineOptions(folder, "cpu", config=EngineConfig(kv_memory_mib=16))
    engine = build_engine_from(options, ())
    assert "tokenizer" in vars(engine._grammars)
    engine.close()
