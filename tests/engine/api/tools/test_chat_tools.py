"""Chats with tools over HTTP."""

import json
import re
from pathlib import Path

import jsonschema
import openai
import pytest

from tests.engine.api.serving import KEY, MODEL, nested, refusal
from tests.engine.api.tools.outputs import collected, pairs_of

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
OTHER = {"properties": {"zone": {"enum": ["utc", "local"]}}, "required": ["zone"], "additionalProperties": False}
SCHEMAS = {"weather": SCHEMA, "clock": OTHER}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"The {name}.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ASKED = {
    "model": MODEL, "messages": [{"role": "user", "content": "Is it cold?"}], "max_tokens": 200, "seed": 1,
    "tools": TOOLS, "parallel_tool_calls": False,
}  # fmt: skip
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "clock"}}


def post(http, **fields):
    return http.post("/v1/chat/completions", json=ASKED | fields)


def choices_of(http, **fields):
    """Return the content, calls and finish reason of each output, which must be the same streamed and not."""
    answer = post(http, **fields)
    assert answer.status_code == 200, answer.text
    whole = [
        (choice["message"]["content"], pairs_of(choice["message"].get("tool_calls", [])), choice["finish_reason"])
        for choice in answer.json()["choices"]
    ]
    deltas, reasons = [[] for _ in whole], [None] * len(whole)
    with http.stream("POST", "/v1/chat/completions", json=ASKED | fields | {"stream": True}) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line.removeprefix("data: "))["choices"]
                deltas[choice["index"]].append(choice["delta"])
                reasons[choice["index"]] = choice["finish_reason"]
    streamed = [(*collected(each), reason) for each, reason in zip(deltas, reasons, strict=True)]
    assert streamed == [(content or "", calls, reason) for content, calls, reason in whole]
    return whole


@pytest.mark.parametrize("temperature", [0, 1])
def test_drafters_do_not_change_required_calls(http, temperature):
    payload = {"tool_choice": "required", "temperature": temperature, "n": 1 + 2 * temperature}
    expected = choices_of(http, **payload, drafter="none")
    for _, calls, reason in expected:
        [(name, arguments)] = calls
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        assert reason == "tool_calls"
    # The corpus then has many other calls, and the same calls.
    for seed in range(2):
        choices_of(http, tool_choice="required", temperature=1, seed=100 + seed)
    assert choices_of(http, **payload, drafter="ssd") == expected


def test_a_named_function_is_called(http):
    fields = {"parallel_tool_calls": True, "stop": ["nothing of this"]}
    [(content, [(name, arguments)], reason)] = choices_of(http, tool_choice=NAMED, **fields)
    assert (content, name, reason) == (None, "clock", "tool_calls")
    assert json.loads(arguments)["zone"] in ("utc", "local")


OSLO = ("weather", '{"city": "Oslo", "days": 1}')
NEWS = CALL.replace("weather", "news")


@pytest.mark.parametrize(
    ("text", "fields", "content", "calls", "reason"),
    [
        (f"I look.\n{CALL}", {}, "I look.", [OSLO], "tool_calls"),
        ("It is cold. ", {}, "It is cold. ", [], "stop"),
        (NEWS, {}, NEWS, [], "stop"),
        (CALL, {"tool_choice": "none"}, CALL, [], "stop"),
        (f"{CALL}\n{CALL}", {}, CALL, [OSLO], "tool_calls"),
        (f"{CALL}\n{CALL}", {"parallel_tool_calls": True}, None, [OSLO, OSLO], "tool_calls"),
        (f"I look.{CALL}", {"stop": ["<tool_call>"]}, "I look.", [], "stop"),
    ],
    ids=["call", "no call", "unknown", "not allowed", "too many", "several", "stop string"],
)
def test_the_model_may_call_tools_or_not(http, text, fields, content, calls, reason):
    assert choices_of(http, structured_outputs={"choice": [text]}, **fields) == [(content, calls, reason)]


def test_an_answer_in_place_of_calls_follows_the_response_format(http):
    schema = {"type": "object", "properties": {"cold": {"enum": [True, False]}}, "required": ["cold"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    [(content, calls, reason)] = choices_of(http, response_format=form)
    assert (json.loads(content)["cold"] in (True, False), calls, reason) == (True, [], "stop")
    begins_call = {"4095": 100}
    [(content, calls, reason)] = choices_of(http, response_format=form, logit_bias=begins_call, tools=TOOLS[1:])
    assert (content, reason) == (None, "tool_calls")
    assert calls in ([("clock", f'{{"zone": "{zone}"}}')] for zone in ("utc", "local"))
    assert post(http, response_format={"type": "json_object"}, max_tokens=1).status_code == 200


def test_a_call_that_max_tokens_cuts_is_content(http):
    [(content, calls, reason)] = choices_of(http, structured_outputs={"choice": [CALL]}, max_tokens=20)
    assert content
    assert (content, calls, reason) == (CALL[: len(content)], [], "length")


def test_tools_are_shown_to_the_model_unless_the_choice_is_none(http):
    def prompt_tokens(**fields):
        return post(http, max_tokens=1, **fields).json()["usage"]["prompt_tokens"]

    assert prompt_tokens() > prompt_tokens(tool_choice="none") == prompt_tokens(tools=[])


def test_a_conversation_with_the_official_client(http):
    messages = [{"role": "user", "content": "Is it cold?"}]
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key=KEY, max_retries=0) as client:
        payload = {"model": MODEL, "tools": TOOLS, "max_tokens": 100, "seed": 3, "parallel_tool_calls": False}
        answer = client.chat.completions.create(messages=messages, tool_choice="required", **payload).choices[0]
        [call] = answer.message.tool_calls
        assert answer.finish_reason == "tool_calls"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
        with client.chat.completions.stream(messages=messages, tool_choice="required", **payload) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls"
        assert [each.function.arguments for each in streamed.message.tool_calls] == [call.function.arguments]
        messages += [answer.message, {"role": "tool", "tool_call_id": call.id, "content": "-3 °C"}]
        after = client.chat.completions.create(messages=messages, **payload)
        assert after.choices[0].message.role == "assistant"


def function(**fields):
    return {"tools": [{"type": "function", "function": {"name": "f"} | fields}]}


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "news"}}}, "there is no tool 'news'", "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "required", "tool_choice.function"),
        ({"tool_choice": "any"}, "must be none, auto, required, or an object", "tool_choice"),
        ({"tool_choice": 5}, "must be none, auto, required, or an object", "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "required needs tools", "tool_choice"),
        ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured output", "tool_choice"),
        ({"tool_choice": NAMED, "response_format": {"type": "json_object"}}, "structured output", "tool_choice"),
        ({"tool_choice": "required", "ignore_eos": True}, "cannot be combined with tools", "ignore_eos"),
        ({"tools": TOOLS + TOOLS}, "two tools have the name 'weather'", "tools"),
        ({"tools": TOOLS * 65}, "at most 128 items", "tools"),
        ({"tools": [{"type": "retrieval"}]}, "Input should be 'function'", "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "required", "tools.0.function"),
        ({"tools": ["f"]}, "", "tools.0"),
        (function(name="a b"), "should match pattern", "tools.0.function.name"),
        (function(parameters={"type": "array"}), "must be a JSON schema of the type object", "tools.0.function"),
        (function(parameters=[]), "valid dictionary", "tools.0.function.parameters"),
        (function(color=1), "there is no parameter", "tools.0.function.color"),
        (function(parameters={"not": {}}) | {"tool_choice": "required"}, 'Unimplemented keys: ["not"]', "tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"title": "a" * 140_000}}}},
         "json_schema: it has 140,", "response_format.json_schema"),
        (function(parameters={"x-guidance": 5}) | {"tool_choice": "required"}, "it cannot be used", "tools"),
        (function(parameters={"properties": {"a": {"multipleOf": 123456789}}}) | {"tool_choice": "required"},
         "tools: it cannot be compiled within the limits of 0.2 s", "tools"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_in_one_line(http, fields, message, param):
    error = refusal(http, "chat/completions", **ASKED | fields)
    assert message in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize("depth", [400, 900])
def test_deeply_nested_schemas_are_answered(http, depth):
    """The engine process survives them."""
    required = function(parameters={"properties": {"a": nested(depth)}}) | {"tool_choice": "required"}
    output = {"response_format": {"type": "json_schema", "json_schema": {"schema": nested(depth)}}}
    for payload in (required, output | {"tool_choice": "none"}):
        assert post(http, **payload, max_tokens=2).status_code in (200, 400)
        assert http.get("/health").status_code == 200


def test_the_examples_of_the_documentation_work(http):
    documentation = (Path(__file__).parents[4] / "docs" / "api.md").read_text()
    bodies = re.findall(r"v1/chat/completions .*? -d '(.*?)'\n", documentation, re.DOTALL)
    assert len(bodies) == 2
    for body in bodies:
        payload = json.loads(body) | {"model": MODEL, "max_tokens": 8}
        assert http.post("/v1/chat/completions", json=payload).status_code == 200
