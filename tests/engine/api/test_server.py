"""The server with the shipped model, used through OpenAI's client and plain HTTP."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import pytest

from tests.engine.api.serving import KEY, MODEL, PROMPTS, TIMEOUT_S, complete, eventually, metric, newest_child, serving

PROMPT = "def quicksort(items):\n    "
LONG = {"model": MODEL, "prompt": PROMPT, "max_tokens": 900, "temperature": 1, "ignore_eos": True}
PAGE = "https://page.example"
NO_DRAFTS = ("--drafter", "none")
"""Shortens the start of a server."""


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT_S)


@pytest.fixture
def client(server):
    with client_of(server) as client:
        yield client


def test_the_model_is_listed(client, server):
    [model] = client.models.list().data
    assert model.id == MODEL
    assert f"context window: {model.max_model_len} tokens\n" in server.printed
    assert model.drafters == ["ssd"]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="this server has 'stdlib-7m'"):
        client.completions.create(model="gpt-4", prompt="x")


@pytest.mark.parametrize("route", PROMPTS)
def test_a_stream_equals_the_complete_response(http, route):
    text, whole = complete(http, route, max_tokens=40, temperature=0)
    assert whole["choices"][0]["finish_reason"] == "length"
    usage = whole["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (40, 40 + usage["prompt_tokens"])
    payload = PROMPTS[route] | {"model": MODEL, "max_tokens": 40, "temperature": 0, "stream": True}
    lines = http.post(f"/v1/{route}", json=payload | {"stream_options": {"include_usage": True}}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(each.get("text") or each.get("delta", {}).get("content", "") for each in choices) == text
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 40)
    assert len({chunk["id"] for chunk in (*chunks, last)}) == 1
    assert route == "completions" or choices[0]["delta"]["role"] == "assistant"


def test_several_prompts_with_several_outputs(client):
    payload = {"model": MODEL, "prompt": ["def a():", "def b():"], "n": 3, "max_tokens": 8, "temperature": 1, "seed": 5}
    answer = client.completions.create(**payload)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert len(set(texts[:3])) == 3  # each has a seed of its own
    assert [choice.text for choice in client.completions.create(**payload).choices] == texts
    streamed = [""] * 6
    for chunk in client.completions.create(**payload, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_stop_strings_end_the_text_before_them(client):
    payload = {"model": MODEL, "prompt": PROMPT, "max_tokens": 60, "temperature": 0}
    text = client.completions.create(**payload).choices[0].text
    stop = text[20:23]
    answer = client.completions.create(**payload, stop=[stop, "never there"])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_dump()["stop_reason"] == stop
    streamed = client.completions.create(**payload, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text[: text.index(stop)]


def test_logprobs_are_sent_with_their_tokens(client):
    """Text that may become a stop string is sent later than its tokens."""
    payload = {"model": MODEL, "prompt": PROMPT, "max_tokens": 10, "temperature": 0, "logprobs": 3}
    choice = client.completions.create(**payload).choices[0]
    one_by_one = {"stop": choice.text[:8] + "\0", "stream": True, "extra_body": {"max_draft": 0}}
    streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(**payload, **one_by_one)]
    assert [token for each in streamed if each for token in each.tokens] == choice.logprobs.tokens
    assert [at for each in streamed if each for at in each.text_offset] == choice.logprobs.text_offset


def test_unknown_routes_return_errors_in_the_same_format(http):
    assert http.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert http.get("/v1/completions").status_code == 405
    assert "message" in http.get("/v1/completions").json()["error"]


def test_requests_of_disconnected_clients_are_cancelled(http, server):
    generated = metric(http, "vllm:generation_tokens_total")
    with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
        next(stream.iter_lines())
    eventually(lambda: metric(http, "vllm:num_requests_running") == 0)
    assert metric(http, "vllm:generation_tokens_total") < generated + 900
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(LONG).encode()
    with socket.create_connection((host, int(port))) as caller:
        caller.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (KEY.encode(), len(body), body)
        )
        eventually(lambda: metric(http, "vllm:num_requests_running") == 1)
    eventually(lambda: metric(http, "vllm:num_requests_running") == 0)


def test_two_hundred_streams_at_once(server):
    async def one(client, number):
        payload = {"prompt": f"def function_{number}(", "max_tokens": 6, "temperature": 0, "stream": True}
        chunks = await client.completions.create(model=MODEL, **payload)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def main():
        unlimited = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=TIMEOUT_S)
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, http_client=unlimited
        ) as client:
            return await asyncio.gather(*(one(client, number % 50) for number in range(200)))

    texts = asyncio.run(main())
    assert all(texts)
    assert texts[:50] == texts[50:100] == texts[100:150] == texts[150:]


def test_health_and_metrics(http):
    complete(http, max_tokens=2)
    assert http.get("/health").json() == {"status": "ok"}
    assert metric(http, "vllm:time_to_first_token_seconds_count") > 0
    assert http.get("/figures").json()["generated_tokens"] == metric(http, "vllm:generation_tokens_total") > 0


@pytest.fixture(scope="module")
def small(folder, keys):
    """A server with little memory and a short queue; the last test that uses it stops it."""
    options = ("--cors-origin", PAGE, "--max-sequences", "1", "--max-waiting", "1", "--kv-memory", "8", *NO_DRAFTS)
    with serving("--api-keys", str(keys), *options, model=folder) as server:
        yield server


def test_requests_are_answered_while_the_model_is_loaded(small):
    assert (small.early.status_code, small.early.headers["retry-after"]) == (503, "5")
    assert "the model has been loading for " in small.early.json()["error"]["message"]
    cause = "as many as --kv-memory 8 holds; 13 would hold the model's 2048"
    assert re.search(rf"^context window: \d+ tokens \({cause}\)$", small.printed, re.MULTILINE)


@pytest.mark.parametrize(("origin", "allowed"), [(PAGE, PAGE), ("https://other.example", None)])
def test_keys_and_allowed_origins(small, origin, allowed):
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    # Browsers send no key with this request.
    answer = httpx.options(f"{small.url}/v1/completions", headers={"Origin": origin} | asked)
    assert answer.is_success == (allowed is not None)
    for status, key in ((200, KEY), (401, "wrong")):
        headers = {"Origin": origin, "Authorization": f"Bearer {key}"}
        got = small.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=headers)
        assert got.status_code == status
        assert got.headers.get("access-control-allow-origin") == allowed


def test_a_full_queue(small):
    assert small.http.post("/v1/completions", json=LONG | {"n": 3}).status_code == 400
    with small.http.stream("POST", "/v1/completions", json=LONG | {"stream": True, "n": 2}) as stream:
        lines = stream.iter_lines()  # Kept, because its end closes the stream.
        next(lines)
        refused = small.http.post("/v1/completions", json=LONG)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    eventually(lambda: metric(small.http, "vllm:num_requests_running") == 0)


def test_streams_finish_after_a_signal_to_stop(small):
    payload = LONG | {"max_tokens": 200, "temperature": 0, "ignore_eos": False, "stream": True}
    payload["structured_outputs"] = {"regex": "[a-z]{1000}"}  # The process that checks grammars runs, too.
    with small.http.stream("POST", "/v1/completions", json=payload) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert len(running_in(small.process.pid)) > 3  # HTTP, engine, resource tracker and that process.
        os.killpg(small.process.pid, signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert small.process.wait(TIMEOUT_S) == 0
    eventually(lambda: not running_in(small.process.pid))
    assert "waiting up to 30 s for running requests" in small.process.stdout.read()


def running_in(group):
    """Return the states of the processes of a process group that have not ended."""
    states = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                states.append(state)
    return states


def test_a_second_signal_stops_at_once(folder):
    with serving(*NO_DRAFTS, model=folder) as server:
        with server.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            engine = newest_child(server.process.pid)
            os.kill(engine, signal.SIGSTOP)  # The request cannot end in the meantime.
            server.process.send_signal(signal.SIGINT)
            assert "for running requests" in server.process.stdout.readline()
            server.process.send_signal(signal.SIGINT)
            assert "stopping at once" in server.process.stdout.readline()
            os.kill(engine, signal.SIGCONT)
            with suppress(httpx.TransportError):
                list(lines)
        _, errors = server.process.communicate(timeout=TIMEOUT_S)
        assert "Traceback" not in errors


def test_an_interruption_while_the_model_is_loaded_is_one_line(folder):
    # Programs that run in the background ignore SIGINT, and so would the server.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-m", "engine.commands.main", "serve", "--model", str(folder), "--port", "0", *NO_DRAFTS]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, text=True, process_group=0)
    signal.signal(signal.SIGINT, before)
    with process:
        url = re.search(r"http://\S+", process.stdout.readline())[0]
        httpx.get(url, timeout=TIMEOUT_S)  # The engine's process has been started.
        os.killpg(process.pid, signal.SIGINT)
        try:
            assert process.communicate(timeout=TIMEOUT_S)[1] == "interrupted\n"
        finally:
            process.kill()
    assert process.returncode == 130
