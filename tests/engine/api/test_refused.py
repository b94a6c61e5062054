"""Bodies that the server refuses: one table of fields, the parameter that the error names, and words of its message."""

import json

import pytest
from pydantic import ValidationError

from engine.api.schemas import ChatRequest, CompletionRequest
from tests.engine.api.serving import MODEL, PROMPTS, refusal

REGEX, JSON = "structured_outputs.regex", "response_format.json_schema"
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
EITHER = "a string or a list of token ids, or a list of either"
PARTS = "a string or a list of parts of the type text"
SETTINGS = "chat_template_kwargs"


def schema_of(definition):
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": definition}}}


def constrained(**fields):
    return {"structured_outputs": fields}


def message(**fields):
    return {"messages": [{"role": "assistant", "content": "x"} | fields]}


def tool(**fields):
    return {"type": "function", "function": {"name": "look", **fields}}


BOTH = [
    ({"temperature": 3}, "temperature", "less than or equal"),
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "must be token ids"),
    ({"logit_bias": {"1": 1000}}, "logit_bias", "numbers from -100 to 100"),
    ({"seed": 1 << 70}, "seed", ""),
    ({"stop": ["a"] * 65}, "stop", "at most 64 items"),
    ({"stop": 5}, "stop", "a string or a list of strings"),
    ({"stop": [""]}, "stop", "must not contain an empty string"),
    ({"stop_token_ids": [1_000_000]}, "stop_token_ids", ""),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", ""),
    ({"stream_options": {}}, "stream_options", "needs stream"),
    ({"verification": "greedy"}, "verification", "Input should be"),
    ({"prediction": "text"}, "prediction", ""),
    ({"prediction": {"type": "tokens", "content": "x"}}, "prediction.type", "Input should be 'content'"),
    ({"drafter": "ssd+mtp"}, "drafter", "must be ssd or none; 'mtp' is not loaded"),
    ({"max_draft": 17}, "max_draft", "must be 0 to 16, not 17"),
    ({"rollout": {"group": "a" * 10_240}}, "rollout", "group must have 1 to 512 bytes, not 10240"),
    ({"rollout": {"group": "a", "version": -1}}, "rollout", "version must be 0 to 4294967295, not -1"),
    ({"metadata": {"content": 5}}, "metadata.content", "valid string"),
    ({"color": 1}, "color", "there is no parameter"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", ""),
    (schema_of({"type": "objec"}), JSON, "Invalid type: objec"),
    (schema_of({"not": {}}), JSON, 'Unimplemented keys: ["not"]'),
    (schema_of({"$ref": "https://localhost/x"}), JSON, "it cannot be used"),
    (schema_of({"multipleOf": 10**400}), JSON, "number out of range"),
    (schema_of({"$ref": "#/anyOf/" + "9" * 5000}), JSON, "Pointer '/anyOf/9999"),
    (schema_of({"multipleOf": 123456789}), JSON, "0.2 s of processor time, 256 MiB of memory"),
    (schema_of({"enum": ["a" * 140_000]}), JSON, "characters; at most 131,072"),
    (constrained(regex="("), REGEX, "unclosed group"),
    (constrained(regex="\ud800"), REGEX, "it cannot be used"),
    (constrained(regex=r"[^\s\S]"), REGEX, "no token can continue"),
    (constrained(regex=r"\w*" * 5_000), REGEX, "0.2 s of processor time, 256 MiB of memory"),
    (constrained(choice=[]), "structured_outputs.choice", "at least 1 item"),
    (constrained(), "structured_outputs", "either regex or choice"),
    (constrained(regex="a", choice=["a"]), "structured_outputs", "either regex or choice"),
    (constrained(regex="a") | {"response_format": JSON_SCHEMA}, "structured_outputs", "send one"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    ({"response_format": JSON_SCHEMA, "ignore_eos": True}, "ignore_eos", "cannot be combined with json_schema"),
    ({"response_format": JSON_SCHEMA, "min_tokens": 2}, "min_tokens", "cannot be combined with json_schema"),
]
COMPLETIONS = [
    ({"max_tokens": 0}, "max_tokens", "needs echo"),
    ({"prompt": []}, "prompt", "at least 1 item"),
    ({"prompt": [-1]}, "prompt.0", "greater than or equal to 0"),
    ({"prompt": [5_000_000_000]}, "prompt.0", "less than"),
    ({"prompt": [1_000_000]}, "prompt", "the prompt"),
    ({"prompt": "x " * 5000}, "prompt", "the prompt"),
    # Fields of several possible types: the message is about the type that was sent.
    ({"prompt": 5}, "prompt", EITHER),
    ({"prompt": ["a", 1]}, "prompt", EITHER),
    ({"prompt": [1.5]}, "prompt", EITHER),
    ({"tools": []}, "tools", "send messages to /v1/chat/completions"),
    ({"tool_choice": "auto"}, "tool_choice", "send messages to /v1/chat/completions"),
]
CHATS = [
    ({"messages": []}, "messages", "at least 1 item"),
    (message(content=5), "messages.0.content", PARTS),
    (message(content=[5]), "messages.0.content", PARTS),
    (message(content=[{"type": "text", "text": 5}]), "messages.0.content", PARTS),
    (message(content=[{"type": "image_url", "image_url": {}}]), "messages.0.content.0.type", "Input should be 'text'"),
    (message(content=None), "messages.0", "a message needs content"),
    (message(content="x " * 5000), "messages", "the prompt"),
    (message(audio={"id": "1"}), "messages.0.audio", "there is no parameter"),
    (message(function_call={"id": "1"}), "messages.0.function_call", "there is no parameter"),
    # Settings of the prompt that have no effect.
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt", "must be false"),
    ({"add_generation_prompt": True, SETTINGS: {"add_generation_prompt": False}}, "add_generation_prompt", "differs"),
    ({SETTINGS: {"tools": []}}, SETTINGS, "send tools as a field"),
    ({SETTINGS: {"tokenize": False}}, SETTINGS, "does not use 'tokenize'"),
    ({SETTINGS: {"enable_thinking": False}}, SETTINGS, "does not use 'enable_thinking'"),
    ({SETTINGS: {"add_generation_prompt": "no"}}, "add_generation_prompt", "valid boolean"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "does not use"),
    ({"reasoning_effort": "low", SETTINGS: {"reasoning_effort": "high"}}, "reasoning_effort", "differs"),
    ({"tool_choice": "required"}, "tool_choice", "required needs tools"),
    ({"tools": [tool()], "tool_choice": tool(strict=True)}, "tool_choice", "send only the name of the function"),
    ({"top_logprobs": 3}, "top_logprobs", "needs logprobs to be true"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "differs from max_completion_tokens"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
]
ROWS = [("completions", *row) for row in BOTH + COMPLETIONS] + [("chat/completions", *row) for row in BOTH + CHATS]


@pytest.mark.parametrize(("route", "fields", "param", "words"), ROWS, ids=range(len(ROWS)))
def test_what_cannot_be_used_is_refused_in_one_line(http, route, fields, param, words):
    error = refusal(http, route, **fields)
    assert words in error["message"]
    assert error["param"] == param
    assert (error["code"] == "unknown_parameter") == (words == "there is no parameter")


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (CompletionRequest, {"prompt": [-1] * 1000}),
        (CompletionRequest, {"prompt": ["a"] * 1000}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": [-1] * 1000}),
        (CompletionRequest, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(1000)), 1000)}),
        (CompletionRequest, {"prompt": "a", **dict.fromkeys(map(str, range(1000)), 1)}),
        (ChatRequest, {"messages": [{"a": 1}] * 1000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 1000}]}),
    ],
)
def test_a_body_with_many_mistakes_has_few_errors(body, fields):
    """Each takes as long as a token, in the event loop."""
    with pytest.raises(ValidationError) as found:
        body.model_validate({"model": MODEL, **fields})
    assert found.value.error_count() < 10


@pytest.mark.parametrize("route", PROMPTS)
def test_streams_that_cannot_be_used_are_refused_by_their_status(http, route):
    assert refusal(http, route, stream=True, drafter="mtp")["param"] == "drafter"


@pytest.mark.parametrize(
    ("content", "message", "param"),
    [
        (b"", "the body is empty; send a JSON object with the fields model and prompt, or model and messages", "model"),
        (b"{}", "model and {prompt} are missing", "model"),
        (b"[]", "the body must be a JSON object", None),
        (b'{"model": "stdlib-7m"}', "{prompt} is missing", "{prompt}"),
        (b'{"model": "caf\xe9"}', "the body is not UTF-8", None),
        (b"[" * 100_000, "the body is nested too deeply", None),
        (b"[1", "the body is not JSON: Expecting ',' delimiter", None),
    ],
)
def test_the_server_says_what_is_wrong_with_a_body(http, content, message, param):
    for route, prompt in (("completions", "prompt"), ("chat/completions", "messages")):
        answer = http.post(f"/v1/{route}", content=content, headers={"Content-Type": "application/json"})
        error = answer.json()["error"]
        assert (answer.status_code, error["message"]) == (400, message.format(prompt=prompt))
        assert error["param"] == (param and param.format(prompt=prompt))


@pytest.mark.parametrize("route", PROMPTS)
@pytest.mark.parametrize(
    "field",
    [
        '"metadata": ' + '{"a":' * 500 + "1" + "}" * 500,
        '"seed": ' + "1" * 100_000,
        '"\\ud800": 1',
        '"prompt": "\\ud800"',
        '"messages": [{"role": "user", "content": "\\ud800"}]',
    ],
    ids=["depth", "digits", "name", "prompt", "message"],
)
def test_values_that_python_cannot_represent_are_refused(http, route, field):
    body = f'{{"model": "{MODEL}", {json.dumps(PROMPTS[route])[1:-1]}, {field}}}'
    answer = http.post(f"/v1/{route}", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_a_missing_content_type_is_explained(http, kind):
    payload = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1})
    answer = http.post("/v1/completions", content=payload, headers={"Content-Type": kind})
    message = answer.json()["error"]["message"]
    assert (answer.status_code, message) == (400, "send the header Content-Type: application/json")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_more_output_than_the_context_window_holds_is_refused(http, field):
    window = http.get("/v1/models").json()["data"][0]["max_model_len"]
    error = refusal(http, "chat/completions" if "completion" in field else "completions", **{field: window})
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert error["message"].startswith(f"{field}: {window} exceeds the ")


def test_a_default_length_fits_the_context_window(http):
    window = http.get("/v1/models").json()["data"][0]["max_model_len"]
    payload = {"model": MODEL, "prompt": [5] * (window - 3), "ignore_eos": True}
    for fields in ({}, {"max_tokens": 3}):
        usage = http.post("/v1/completions", json=payload | fields).json()["usage"]
        assert usage["completion_tokens"] == 3
    error = refusal(http, "completions", prompt=[5] * (window - 3), max_tokens=4)
    assert error["message"].startswith("max_tokens: 4 exceeds the 3 tokens that the prompt of ")
