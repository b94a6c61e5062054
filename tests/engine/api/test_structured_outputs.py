"""Outputs that match a JSON schema, a regular expression or one of several choices, over HTTP."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.api.server import build_engine_from
from engine.commands.options import EngineOptions
from tests.engine.api.serving import MODEL, PROMPTS, complete

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


def post(http, **fields):
    body = {"model": MODEL, "prompt": "def f(x):", "max_tokens": 64, "seed": 1}
    return http.post("/v1/completions", json=body | fields)


def check(text):
    value = json.loads(text)
    assert list(value) == ["name", "state", "age"]
    assert value["state"] in ("active", "inactive")
    assert 0 <= value["age"] <= 99
    assert text == json.dumps(value, ensure_ascii=False)


def check_example(http, route="completions"):
    text, answer = complete(http, route, max_tokens=64, seed=1, response_format=JSON_SCHEMA)
    assert answer["choices"][0]["finish_reason"] == "stop"
    check(text)


@pytest.mark.parametrize("route", PROMPTS)
def test_outputs_match_a_schema(http, route):
    check_example(http, route)


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"regex": "[a-z]{3}-[0-9]{2}"}, "[a-z]{3}-[0-9]{2}"),
        ({"choice": ['say "yes"', "né\n", "no"]}, 'say "yes"|né\n|no'),
    ],
    ids=["regex", "choice"],
)
def test_outputs_match_a_regular_expression_or_a_choice(http, given, pattern):
    [choice] = post(http, structured_outputs=given, response_format={"type": "text"}).json()["choices"]
    assert re.fullmatch(pattern, choice["text"])
    assert choice["finish_reason"] == "stop"


def test_any_json_object(http):
    """The model does not know JSON, so that only some of its objects end."""
    choices = post(http, response_format={"type": "json_object"}, n=16, temperature=1.5).json()["choices"]
    assert all(choice["text"].startswith("{") for choice in choices)
    ended = [choice["text"] for choice in choices if choice["finish_reason"] == "stop"]
    assert ended
    assert all(isinstance(json.loads(text), dict) for text in ended)


def test_max_tokens_may_cut_an_output(http):
    [choice] = post(http, response_format=JSON_SCHEMA, max_tokens=3).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ('{"name', "length")


def test_forced_tokens_are_reported(http):
    fields = {"response_format": JSON_SCHEMA, "temperature": 0.8, "n": 4, "seed": 7}
    plain, drafted = (post(http, **fields, drafter=drafter).json() for drafter in ("none", "ssd"))
    assert drafted["usage"]["draft"]["by_source"]["grammar"]["accepted_tokens"] > 20
    assert "grammar" not in plain["usage"]["draft"]["by_source"]
    assert [choice["text"] for choice in drafted["choices"]] == [choice["text"] for choice in plain["choices"]]


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
JSON = "response_format.json_schema"


def test_an_output_that_reaches_a_limit_of_the_library_ends_with_an_error(http):
    """Other requests are not affected, neither in the same batch nor later."""
    message = (
        f"{JSON}: the output cannot be continued, because llguidance has reached one of its limits: Parser Error: "
        "Current row has"
    )
    limited = {"type": "json_schema", "json_schema": {"schema": LIMITED}}
    fields = {"response_format": limited, "temperature": 1.5}
    with ThreadPoolExecutor() as threads:
        others = [threads.submit(check_example, http) for _ in range(2)]
        answers = [post(http, **fields) for _ in range(2)]
        for other in others:
            other.result()
    for answer in answers:
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["message"].startswith(message)
        assert error["message"].endswith("; use smaller repetitions, or fewer alternatives with the same beginning")
        assert "\n" not in error["message"]
        assert error["param"] == JSON
    *parts, last, done = [line[6:] for line in post(http, stream=True, **fields).text.splitlines() if line]
    assert len(parts) > 5
    assert (json.loads(last)["error"], done) == (error, "[DONE]")
    check_example(http)


def test_the_server_reads_the_tokenizer_before_the_first_grammar(folder):
    options = EngineOptions(folder=folder, device="cpu", kv_memory_mib=16)
    engine = build_engine_from(options, ())
    assert "tokenizer" in vars(engine._grammars)
    engine.close()
