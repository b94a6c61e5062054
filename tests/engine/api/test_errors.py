"""Error messages for invalid bodies."""

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from engine.api.errors import from_validation
from engine.api.schemas import CompletionRequest


@pytest.mark.parametrize(
    ("field", "param", "message"),
    [
        # Fields of several possible types: the message is about the type that was sent.
        ({"stop": ["a"] * 65}, "stop", "at most 64 items"),
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": [[]]}, "prompt.0", "at least 1 item"),
        ({"prompt": [-1]}, "prompt.0", "greater than or equal to 0"),
        ({"stop": 5}, "stop", "a string or a list of strings"),
        ({"prompt": 5}, "prompt", "a string or a list of token ids, or a list of either"),
        ({"prompt": ["a", 1]}, "prompt", "a string or a list of token ids, or a list of either"),
        ({"prompt": [[1], "a"]}, "prompt", "a string or a list of token ids, or a list of either"),
        ({"prompt": [1.5]}, "prompt", "a string or a list of token ids, or a list of either"),
        ({"metadata": {"content": 5}}, "metadata.content", "valid string"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"color": 1}, "color", "there is no parameter"),
    ],
)
def test_the_first_error_names_its_parameter(field, param, message):
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"model": "m", "prompt": "x"} | field)
    found = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    error = from_validation(RequestValidationError(found))
    assert (error.status, error.param) == (400, param)
    assert message in error.message


@pytest.mark.parametrize(
    ("content", "message", "param"),
    [
        (b"", "the body is empty; send a JSON object with the fields model and prompt, or model and messages", "model"),
        (b"{}", "model and {prompt} are missing", "model"),
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


@pytest.mark.parametrize("content", [5, [5], [{"type": "text", "text": 5}]])
def test_the_possible_types_of_a_message_are_named(http, content):
    payload = {"model": "stdlib-7m", "messages": [{"role": "user", "content": content}]}
    error = http.post("/v1/chat/completions", json=payload).json()["error"]
    assert error["message"] == "messages.0.content: must be a string or a list of parts of the type text"
    assert error["param"] == "messages.0.content"


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"group": "a" * 10_240}, "rollout: group must have 1 to 512 bytes, not 10240"),
        ({"group": "a", "version": -1}, "rollout: version must be 0 to 4294967295, not -1"),
    ],
)
def test_rollouts_out_of_range_are_refused(http, rollout, message):
    payload = {"model": "stdlib-7m", "prompt": "x", "rollout": rollout}
    answer = http.post("/v1/completions", json=payload)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_more_output_than_the_context_window_holds_is_refused(http, field):
    window = http.get("/v1/models").json()["data"][0]["max_model_len"]
    prompt = {"messages": [{"role": "user", "content": "x"}]} if "completion" in field else {"prompt": [5, 6, 7]}
    route = "chat/completions" if "completion" in field else "completions"
    answer = http.post(f"/v1/{route}", json={"model": "stdlib-7m", field: window} | prompt)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, field, "context_length_exceeded")
    assert error["message"].startswith(f"{field}: {window} exceeds the ")


def test_a_default_length_fits_the_context_window(http):
    window = http.get("/v1/models").json()["data"][0]["max_model_len"]
    payload = {"model": "stdlib-7m", "prompt": [5] * (window - 3), "ignore_eos": True}
    assert http.post("/v1/completions", json=payload).json()["usage"]["completion_tokens"] == 3
    assert http.post("/v1/completions", json=payload | {"max_tokens": 3}).json()["usage"]["completion_tokens"] == 3
    error = http.post("/v1/completions", json=payload | {"max_tokens": 4}).json()["error"]
    assert error["message"].startswith("max_tokens: 4 exceeds the 3 tokens that the prompt of ")
