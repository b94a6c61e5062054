"""Fields of a request's body become the sampling parameters of its requests."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from engine.api.chat import _tool_format
from engine.api.errors import ApiError
from engine.api.schemas import ChatRequest, CompletionRequest
from engine.api.service import Service
from tests.engine.api.serving import MODEL, eventually


@pytest.mark.parametrize("verification", ["exact", "rejection", None])
def test_a_request_chooses_its_verification(verification):
    service = SimpleNamespace(served=SimpleNamespace(defaults={}, adapters=(), answers_repeats=False))
    body = CompletionRequest(model=MODEL, prompt="x", verification=verification, n=2)
    requests = Service.requests(service, body, np.array([5], np.uint32), max_tokens=3)
    assert [request.sampling.verification for request in requests] == [verification] * 2


def test_tools_need_a_known_format_of_calls():
    chat = SimpleNamespace(takes_tools=True)
    service = SimpleNamespace(served=SimpleNamespace(chat=chat, tool_format=None))
    with pytest.raises(ApiError, match=r"start the server with --tool-call-parser hermes\|") as refused:
        _tool_format(service)
    assert (refused.value.status, refused.value.param) == (400, "tools")


def test_verification_is_accepted_and_checked_by_the_server(http):
    payload = {"model": MODEL, "prompt": "x", "max_tokens": 2, "temperature": 1}
    assert http.post("/v1/completions", json=payload | {"verification": "rejection"}).status_code == 200
    answer = http.post("/v1/completions", json=payload | {"verification": "greedy"})
    assert answer.status_code == 400
    assert "verification" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("given", "drafters"), [(None, None), ("none", set()), ("ssd", {"ssd"}), ("a+b", {"a", "b"})])
def test_a_request_chooses_its_drafters(given, drafters):
    service = SimpleNamespace(served=SimpleNamespace(defaults={}, adapters=(), answers_repeats=False))
    body = ChatRequest(model=MODEL, messages=[{"role": "user", "content": "x"}], drafter=given, max_draft=3, n=2)
    requests = Service.requests(service, body, np.array([5], np.uint32), max_tokens=3)
    assert [(request.drafters, request.max_draft) for request in requests] == [(drafters, 3)] * 2


PROMPTS = {
    "completions": {"prompt": "def chosen(items):"},
    "chat/completions": {"messages": [{"role": "user", "content": "def chosen(items):"}]},
}


@pytest.mark.parametrize("route", PROMPTS)
def test_drafters_are_chosen_over_http_and_reported_by_source(http, route):
    def complete(**more):
        payload = {"model": MODEL, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        answer = http.post(f"/v1/{route}", json=payload | PROMPTS[route] | more).json()
        [choice] = answer["choices"]
        return choice.get("text") or choice["message"]["content"], answer["usage"]["draft"]

    # While drafting is not worthwhile, as on a busy machine, little is drafted.
    text, draft = eventually(lambda: answer if (answer := complete())[1]["drafted_tokens"] else None)
    for figure in ("drafted_tokens", "accepted_tokens"):
        assert sum(counts[figure] for counts in draft["by_source"].values()) == draft[figure]
    short_drafts = {"drafter": "ssd", "max_draft": 1}
    chosen, short = eventually(lambda: answer if (answer := complete(**short_drafts))[1]["accepted_tokens"] else None)
    assert chosen == text
    assert 0 < short["accepted_tokens"] <= short["drafted_tokens"] <= short["steps"]
    without, plain = complete(drafter="none")
    assert without == text
    assert plain == {"steps": 40, "drafted_tokens": 0, "accepted_tokens": 0, "tokens_per_step": 1, "by_source": {}}


@pytest.mark.parametrize("route", PROMPTS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"drafter": "mtp"}, "drafter must be ssd or none; 'mtp' is not loaded"),
        ({"drafter": "ssd+mtp"}, "drafter must be ssd or none; 'mtp' is not loaded"),
        ({"drafter": 5}, "drafter: Input should be a valid string"),
        ({"max_draft": 17}, "max_draft must be 0 to 16, not 17"),
    ],
)
def test_drafters_that_are_not_loaded_are_refused(http, route, stream, given, message):
    payload = {"model": MODEL, "max_tokens": 2, "stream": stream} | PROMPTS[route] | given
    answer = http.post(f"/v1/{route}", json=payload)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["message"], error["param"]) == (message, next(iter(given)))
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("route", PROMPTS)
def test_a_predicted_output_does_not_change_the_output(http, route):
    def complete(**more):
        payload = {"model": MODEL, "max_tokens": 40, "temperature": 1, "seed": 7, "ignore_eos": True, "learn": False}
        answer = http.post(f"/v1/{route}", json=payload | PROMPTS[route] | more).json()
        [choice] = answer["choices"]
        return choice.get("text") or choice["message"]["content"]

    text = complete()
    for content in (text, "another text", [{"type": "text", "text": text}]):
        assert complete(prediction={"type": "content", "content": content}) == text


def test_a_predicted_output_becomes_hints():
    def encode(text):
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)

    service = SimpleNamespace(
        served=SimpleNamespace(
            defaults={}, adapters=(), answers_repeats=False, tokenizer=SimpleNamespace(encode=encode)
        )
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = CompletionRequest(model=MODEL, prompt="x", prediction={"type": "content", "content": parts}, n=2)
    hints = asyncio.run(Service.hints(service, body))
    requests = Service.requests(service, body, np.array([5], np.uint32), 3, hints)
    assert [request.hints.tolist() for request in requests] == [[97, 98]] * 2


def test_predictions_of_another_form_are_refused(http):
    payload = {"model": MODEL, "prompt": "x", "max_tokens": 2, "prediction": "text"}
    answer = http.post("/v1/completions", json=payload)
    assert answer.status_code == 400
    assert "prediction" in answer.json()["error"]["message"]
