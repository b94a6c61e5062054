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


def test_the_official_client_reads_errors(http):
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt="x", best_of=3)
        assert caught.value.param == "best_of"
