"""Requests as common clients send them by default, and the fields that they read from responses."""

import openai
import pytest

from tests.engine.api.serving import MODEL

COMPLETIONS = {
    "vllm bench": {
        "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 4, "logprobs": None, "stream": True,
        "stream_options": {"include_usage": True}, "best_of": 1, "ignore_eos": True,
    },
    "langchain OpenAI": {
        "temperature": 0.7, "max_tokens": 4, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0, "n": 1,
        "best_of": 1, "logit_bias": {}, "seed": None, "logprobs": None, "prompt": ["def f("],
    },
    "lm-eval generate": {"prompt": [[5, 6, 7]], "max_tokens": 4, "temperature": 0, "stop": ["\n\n"], "seed": 1234},
    "all nulls": dict.fromkeys(("n", "stream", "echo", "stop", "suffix", "user", "logit_bias", "stream_options")),
}  # fmt: skip
CHATS = {
    "vllm bench": {
        "max_completion_tokens": 4, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    },
    "langchain ChatOpenAI": {"stream": False, "n": 1, "temperature": 0.7, "max_completion_tokens": 4, "stop": None},
    "explicit defaults": {
        "max_tokens": 4, "response_format": {"type": "text"}, "parallel_tool_calls": True, "tools": [],
        "tool_choice": "none", "store": False, "metadata": {"run": "7"}, "service_tier": "auto", "logit_bias": {},
        "logprobs": False, "audio": None, "prediction": None, "reasoning_effort": None,
    },
    "an earlier answer": {
        "max_tokens": 4,
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "y", "refusal": None, "annotations": [], "audio": None,
             "function_call": None, "tool_calls": None},
            {"role": "user", "content": "z", "name": "me"},
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("body", COMPLETIONS.values(), ids=COMPLETIONS)
def test_completions_of_common_clients_work(http, body):
    answer = http.post("/v1/completions", json={"model": MODEL, "prompt": "x"} | body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("body", CHATS.values(), ids=CHATS)
def test_chats_of_common_clients_work(http, body):
    messages = [{"role": "user", "content": "x"}]
    answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages} | body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),  # not used by the chat template
        ({"tool_choice": "required"}, "tool_choice"),
        ({"store": True}, "store"),
        ({"prediction": {"type": "tokens", "content": "x"}}, "prediction.type"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x " * 5000}]}, "messages"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"stop_token_ids": [1_000_000]}, "stop_token_ids"),
        ({"stop": [""]}, "stop"),
        ({"stream_options": {}}, "stream_options"),
    ],
)
def test_unsupported_values_are_refused_with_their_name(http, given, param):
    messages = [{"role": "user", "content": "x"}]
    answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, "max_tokens": 3} | given)
    assert answer.status_code == 400, answer.text
    assert (answer.json()["error"]["param"] or "").startswith(param), answer.text


def test_a_too_long_prompt_has_openais_error_code(http):
    answer = http.post("/v1/completions", json={"model": MODEL, "prompt": "x " * 5000})
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == ("prompt", "context_length_exceeded")


def test_the_official_client_reads_errors(http):
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt="x", best_of=3)
        assert caught.value.param == "best_of"
