"""Fields of request bodies: what they do, and which the server accepts without using them."""

import asyncio
import json
import re
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest

from engine.api.endpoints import tool_format
from engine.api.errors import ApiError
from engine.api.fields import HARMLESS, REPLACEMENTS
from engine.api.schemas import ChatRequest, CompletionRequest
from engine.api.service import Service
from engine.models.shipped import SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from tests.engine.api.serving import KEY, MODEL, PROMPTS, complete, eventually, metric, refusal
from tests.strategies import array

DOCS = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
UNUSED = ("store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields that are accepted and change no answer."""
RULED = ("cache_salt", "return_token_ids", "continue_final_message")
"""Fields of vLLM with a paragraph of their own."""


def body_of(request, **fields):
    prompt = {"prompt": "x"} if request is CompletionRequest else {"messages": [{"role": "user", "content": "x"}]}
    return {"model": MODEL, "max_tokens": 2} | prompt | fields


ROUTES = {ChatRequest: "/v1/chat/completions", CompletionRequest: "/v1/completions"}


@pytest.mark.parametrize("name", [*UNUSED, *RULED])
def test_every_field_with_a_rule_of_its_own_is_documented(name):
    assert f"`{name}`" in DOCS
    assert name in ChatRequest.model_fields


@pytest.mark.parametrize("request_type", ROUTES)
def test_fields_that_the_server_does_not_have_are_accepted_with_harmless_values_only(http, request_type):
    for values in zip_longest(*HARMLESS.values()):
        body = body_of(request_type, **dict(zip(HARMLESS, values, strict=True)))
        answer = http.post(ROUTES[request_type], json=body)
        assert answer.status_code == 200, answer.text
    for name in (*HARMLESS, "guided_json", "structured_outputs.json"):
        field, _, part = name.partition(".")
        given = {field: {part: True} if part else "a value"}
        error = http.post(ROUTES[request_type], json=body_of(request_type, **given)).json()["error"]
        assert (error["param"], error["code"]) == (name, "unknown_parameter")
        assert name in error["message"]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"guided_backend": "x"}, "there is no parameter guided_backend"),
        ({"guided_regex": "a"}, "there is no parameter guided_regex; send structured_outputs with regex"),
        ({"structured_outputs": {"json": {}}},
         "there is no parameter structured_outputs.json; send response_format with a JSON schema"),
        ({"skip_special_tokens": False}, "skip_special_tokens can only be true; send return_token_ids"),
        ({"truncation_side": "both"}, 'truncation_side can only be "left" or "right"'),
    ],
)  # fmt: skip
def test_refusals_name_the_values_and_the_replacement_of_a_field(http, field, message):
    assert refusal(http, "completions", **field)["message"] == message


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_fields_with_a_replacement_are_documented(name):
    assert f"`{name}`" in DOCS


@pytest.mark.parametrize("request_type", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_on_request(http, request_type, stream):
    body = body_of(request_type, return_token_ids=True, max_tokens=9, temperature=0, stream=stream, stop="\n\n\n")
    text = http.post(ROUTES[request_type], json=body).text
    answers = [json.loads(document) for document in (re.findall("data: ({.*})", text) if stream else [text])]
    choices = [choice for answer in answers for choice in answer["choices"]]
    ids = [token for choice in choices for token in choice.get("token_ids", ())]
    prompts = [part["prompt_token_ids"] for part in (*answers, *choices) if "prompt_token_ids" in part]
    logprobs = {"logprobs": True if request_type is ChatRequest else 1, "return_tokens_as_token_ids": True}
    whole = http.post(ROUTES[request_type], json=body | logprobs | {"stream": False}).json()
    scores = whole["choices"][0]["logprobs"]
    names = scores["tokens"] if "tokens" in scores else [entry["token"] for entry in scores["content"]]
    assert [f"token_id:{token}" for token in ids] == names
    assert [len(prompt) for prompt in prompts] == [whole["usage"]["prompt_tokens"]]


MESSAGES = [{"role": "user", "content": "a list"}, {"role": "assistant", "content": "def add(a, b):"}]


def prompt_ids(http, **fields):
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
    answer = http.post(ROUTES[ChatRequest], json=body | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["prompt_token_ids"]


def test_settings_of_the_prompt_take_effect_as_fields_and_as_arguments_of_the_template(http, folder):
    def encoded(text):
        return Tokenizer(folder).encode(text).tolist()

    whole = "# user: a list\n# assistant: def add(a, b):\n"
    assert prompt_ids(http) == prompt_ids(http, add_special_tokens=False) == encoded(f"{whole}# answer\n")
    for given in ({"add_generation_prompt": False}, {"continue_final_message": True}):
        expected = encoded(whole if "add_generation_prompt" in given else whole.removesuffix("\n"))
        assert prompt_ids(http, **given) == prompt_ids(http, chat_template_kwargs=given) == expected


def test_requests_of_another_salt_share_no_pages(http):
    def cached(**fields):
        body = {"model": MODEL, "prompt": [7] * 64 + [9] * 8, "max_tokens": 1} | fields
        return http.post(ROUTES[CompletionRequest], json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0
    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") > 0
    assert cached(cache_salt="a", user="b") == 0


@pytest.mark.parametrize(
    ("fields", "name", "expected"),
    [
        *(({"verification": value}, "sampling.verification", value) for value in ("exact", "rejection", None)),
        ({}, "drafters", None),
        ({"drafter": "none"}, "drafters", frozenset()),
        ({"drafter": "a+b"}, "drafters", {"a", "b"}),
        ({"max_draft": 3}, "max_draft", 3),
    ],
)
@pytest.mark.parametrize("request_type", ROUTES)
def test_fields_reach_the_requests_of_the_engine(request_type, fields, name, expected):
    service = SimpleNamespace(served=SimpleNamespace(defaults={}, adapters=(), answers_repeats=False))
    body = request_type.model_validate(body_of(request_type, n=2) | fields)
    requests = Service.requests(service, body, array([5]), max_tokens=3)
    assert [attrgetter(name)(request) for request in requests] == [expected] * 2


@pytest.mark.parametrize("content", ["ab", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]], ids=str)
def test_a_predicted_output_becomes_hints(content):
    service = SimpleNamespace(served=SimpleNamespace(tokenizer=Tokenizer(SHIPPED_MODEL)))
    body = CompletionRequest(model=MODEL, prompt="x", prediction={"type": "content", "content": content})
    assert asyncio.run(Service.hints(service, body)).tolist() == Tokenizer(SHIPPED_MODEL).encode("ab").tolist()


@pytest.mark.parametrize(
    ("takes_tools", "message"), [(False, "does not use them"), (True, "start the server with --tool-call-parser her")]
)
def test_tools_need_a_template_and_a_known_format_of_calls(takes_tools, message):
    served = SimpleNamespace(chat=SimpleNamespace(takes_tools=takes_tools), tool_format=None)
    with pytest.raises(ApiError, match=message) as refused:
        tool_format(SimpleNamespace(served=served))
    assert (refused.value.status, refused.value.param) == (400, "tools")


@pytest.mark.parametrize("route", PROMPTS)
def test_drafters_are_chosen_over_http_and_reported_by_source(http, route):
    def answered(**more):
        fields = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_drafted": True} | more
        text, answer = complete(http, route, **fields)
        [choice] = answer["choices"]
        assert "".join(piece for piece, _ in choice["pieces"]) == text
        is_drafted = any(is_drafted for _, is_drafted in choice["pieces"])
        assert is_drafted == (answer["usage"]["draft"]["accepted_tokens"] > 0)
        return text, answer["usage"]

    def drafted(**more):
        """Return an answer with drafts; on a busy machine there are none while drafting is not worthwhile."""
        return eventually(lambda: answer if (answer := answered(**more))[1]["draft"]["accepted_tokens"] else None)

    text, usage = drafted()
    draft = usage["draft"]
    for figure in ("drafted_tokens", "accepted_tokens"):
        assert sum(counts[figure] for counts in draft["by_source"].values()) == draft[figure]
    assert draft["tokens_per_step"] == pytest.approx(40 / draft["steps"], abs=1e-3)
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 0  # There was no prediction.
    assert metric(http, "vllm:spec_decode_num_accepted_tokens_total") >= draft["accepted_tokens"]
    chosen, short = answered(drafter="ssd", max_draft=1)
    assert chosen == text
    assert short["draft"]["accepted_tokens"] <= short["draft"]["drafted_tokens"] <= short["draft"]["steps"]
    without, plain = answered(drafter="none")
    assert (without, plain["draft"]["drafted_tokens"], plain["draft"]["steps"]) == (text, 0, 40)
    sampled = {"temperature": 1, "seed": 7, "learn": False}
    text, _ = answered(**sampled)
    for content in ("another text", [{"type": "text", "text": text}]):
        assert answered(**sampled, prediction={"type": "content", "content": content})[0] == text
    predicted = sampled | {"prediction": {"type": "content", "content": text}}
    eventually(lambda: answered(**predicted)[1]["completion_tokens_details"]["accepted_prediction_tokens"])


# --- Requests as common clients send them by default

COMMON = {
    CompletionRequest: {
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
    },
    ChatRequest: {
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
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("request_type", "body"),
    [pytest.param(kind, body, id=f"{name}, {ROUTES[kind]}") for kind in COMMON for name, body in COMMON[kind].items()],
)
def test_requests_of_common_clients_work(http, request_type, body):
    answer = http.post(ROUTES[request_type], json=body_of(request_type, max_tokens=None) | body)
    assert answer.status_code == 200, answer.text


def test_the_official_client_reads_errors(http):
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key=KEY, max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt="x", best_of=3)
        assert caught.value.param == "best_of"
