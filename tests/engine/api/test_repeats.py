"""Repeated requests are answered from the corpus only if the same request has run, and its text is still there."""

import json
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from engine.api.repeats import Repeats, request_id_of
from engine.api.schemas import CompletionRequest
from engine.api.service import Service
from engine.config import EngineConfig
from engine.drafters.registry import build_drafter
from engine.engine import build_engine
from engine.models.shipped import SHIPPED_MODEL
from engine.scheduling.request import Request, SamplingParams
from ssd.config import DrafterConfig
from tests.engine.api.serving import MODEL, complete, eventually, metric
from tests.engine.drafters.kinds import target_of
from tests.strategies import array

BODY = {"model": MODEL, "prompt": "def quicksort(items):\n    ", "max_tokens": 20, "temperature": 0}
SAMPLED = BODY | {"temperature": 1, "seed": 7}
STOPPED = BODY | {"stop": ["r"], "max_tokens": 200}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "temperature": 0}
LATENCY = "vllm:e2e_request_latency_seconds_count"


@pytest.fixture
def http(optional):
    return optional


def route_of(body):
    return "chat/completions" if "messages" in body else "completions"


def ask(http, body):
    return complete(http, route_of(body), **body)[1]


def repeated(http, body):
    """The answer to a request that has run, once the corpus has its output."""
    return eventually(lambda: answer if (answer := ask(http, body))["usage"]["repeated_tokens"] else None)


@pytest.mark.parametrize("body", [BODY, SAMPLED, STOPPED, CHAT], ids=["greedy", "sampled", "stop", "chat"])
def test_a_repeat_has_the_same_answer_without_a_step(http, body):
    body = body | {"user": "equal answers"}
    first = ask(http, body)
    assert first["usage"]["repeated_tokens"] == 0
    repeated(http, body)
    names = (LATENCY, "vllm:generation_tokens_total", "ssd:engine_steps_total", "ssd:learned_tokens_total")
    eventually(lambda: http.get("/figures").json()["running"] == 0)
    before = [metric(http, name) for name in names]
    count, tokens = metric(http, "ssd:repeated_requests_total"), metric(http, "ssd:repeated_tokens_total")
    second = ask(http, body)
    size = first["usage"]["completion_tokens"]
    eventually(lambda: metric(http, "ssd:repeated_requests_total") == count + 1)
    assert metric(http, "ssd:repeated_tokens_total") == tokens + size
    assert [metric(http, name) for name in names] == before
    assert second["choices"] == first["choices"]
    assert second["usage"]["repeated_tokens"] == second["usage"]["completion_tokens"] == size
    assert second["usage"]["draft"]["steps"] == 0
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", f"/v1/{route_of(body)}", json=streamed) as stream:
        chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert chunks[-1]["usage"] == second["usage"]
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    [whole] = first["choices"]
    assert text == (whole.get("text") or whole["message"]["content"])
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == (whole["finish_reason"], whole["stop_reason"])


def test_an_adapter_repeats_its_own_answers(http):
    body = BODY | {"model": "a"}
    first = ask(http, body)
    assert repeated(http, body)["choices"] == first["choices"]
    assert first["choices"] != ask(http, BODY)["choices"]


def test_new_weights_answer_themselves(http):
    ask(http, BODY)
    repeated(http, BODY)
    assert http.post("/v1/weights", json={"path": str(SHIPPED_MODEL)}).status_code == 200
    assert ask(http, BODY)["usage"]["repeated_tokens"] == 0
    repeated(http, BODY)


def test_repeats_run_unless_they_are_enabled(server):
    body = BODY | {"user": "twice"}
    http = server.http
    before = metric(http, "ssd:corpus_tokens")
    ask(http, body)
    eventually(lambda: metric(http, "ssd:corpus_tokens") > before)
    assert ask(http, body)["usage"]["repeated_tokens"] == 0
    assert metric(http, "ssd:repeated_requests_total") == 0


@pytest.fixture(params=["ssd", "rest+ssd"])
def engine(request, model, corpus_file):
    options = {"path": str(corpus_file)} if "rest" in request.param else {}
    drafter = build_drafter(request.param, DrafterConfig(capacity=4096, options=options), target_of(model.config))
    with closing(build_engine(model, EngineConfig(max_sequences=4, kv_memory_mib=4), drafter)) as engine:
        yield engine


def named(prompt, **settings):
    request = Request(np.array(prompt, np.uint32), SamplingParams(max_tokens=30, ignore_eos=True), **settings)
    return replace(request, request_id=request_id_of(request))


def corpus_of(engine):
    return list(engine.drafter.corpora())[-1]


def run(engine, repeats, request):
    """Run a request, and record its output."""
    [completion] = engine.generate([request])
    corpus_of(engine).refresh()
    repeats.add(request, completion)
    return completion


def test_forgotten_and_overwritten_text_is_not_repeated(engine):
    repeats, corpus = Repeats(engine), corpus_of(engine)
    first, second, unlearned = named([5, 6, 7]), named([8, 9]), named([9, 8], learn=False)
    for each in (first, second, unlearned):
        run(engine, repeats, each)
    assert repeats.find(unlearned) is None
    corpus.forget(first.request_id)
    corpus.refresh()
    assert repeats.find(first) is None
    assert repeats.find(second) is not None
    for _ in range(200):
        corpus.append(np.arange(1, 1000, dtype=np.uint32))
    corpus.refresh()
    assert repeats.find(second) is None


@pytest.mark.parametrize("differs", ["prompt", "output", "length"])
def test_text_of_another_request_under_the_same_name_is_not_an_answer(engine, differs):
    """As if two requests had the same digest."""
    repeats = Repeats(engine)
    own = named([5, 6, 7])
    completion = run(engine, repeats, own)
    tokens = {"prompt": completion.tokens, "output": completion.tokens[::-1], "length": completion.tokens[:-1]}[differs]
    prompt = [4, 6, 7] if differs == "prompt" else [5, 6, 7]
    text = np.concatenate((np.array(prompt, np.uint32), tokens))
    corpus_of(engine).append(text, own.request_id)
    corpus_of(engine).refresh()
    assert repeats.find(own) is None


def test_rejected_and_unfinished_outputs_are_not_repeated(engine):
    sampling = SamplingParams(max_tokens=30, temperature=1, verification="rejection")
    assert engine.completed(Request(np.array([5], np.uint32), sampling), np.full(30, 7, np.uint32)) is None
    greedy = Request(np.array([5], np.uint32), SamplingParams(max_tokens=30))
    assert engine.completed(greedy, np.full(29, 7, np.uint32)) is None
    assert engine.completed(greedy, np.full(30, 7, np.uint32)).tokens.tolist() == [7] * 30


def id_of(prompt=(5,), **fields):
    """Return the id of the request that a body makes on a server with the adapter `a`."""
    service = SimpleNamespace(served=SimpleNamespace(defaults={}, adapters=("a",), answers_repeats=True))
    body = CompletionRequest.model_validate(SAMPLED | fields)
    return Service.requests(service, body, array(prompt), body.max_tokens, logprobs=body.logprobs)[0].request_id


OTHERS = [
    {"model": "a"}, {"seed": 8}, {"temperature": 0.9}, {"temperature": 0}, {"max_tokens": 19}, {"stop": ["r"]},
    {"logit_bias": {"5": 1}}, {"max_draft": 0}, {"drafter": "none"}, {"verification": "rejection"},
    {"response_format": {"type": "json_object"}}, {"prompt": (6,)}, {"user": "a"}, {"user": "b"}, {"cache_salt": "a"},
    {"prompt": np.frombuffer(b"efgh", np.uint32), "user": "abcd"}, {"prompt": np.frombuffer(b"abcdefgh", np.uint32)},
]  # fmt: skip


def test_requests_that_differ_have_other_ids_and_those_without_a_known_output_have_none():
    found = [id_of(), *(id_of(**other) for other in OTHERS)]
    assert None not in found
    assert len(set(found)) == len(found)
    assert found[0] == id_of(learn=False)
    assert id_of(temperature=0, seed=1) == id_of(temperature=0, seed=2) == id_of(temperature=0, seed=None)
    for fields in ({"seed": None}, {"logprobs": 1}, {"n": 2}, {"return_token_ids": True}):
        assert id_of(**fields) is None
