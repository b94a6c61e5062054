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
from itertools import takewhile
from pathlib import Path

import httpx
import openai
import pytest

from drafter_service.client.connection import GOOD_RESPONSES
from engine.models.shipped import SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from tests.engine.api.serving import MODEL, TIMEOUT_S, eventually, metric, newest_child, serving
from tests.servers import served

PROMPT = "def quicksort(items):\n    "
NO_DRAFTS = ("--drafter", "none")
"""Shortens the start of a server."""


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)


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


def test_a_stream_equals_the_complete_response(client):
    payload = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**payload)
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.completion_tokens, whole.usage.total_tokens) == (40, 40 + whole.usage.prompt_tokens)
    chunks = list(client.completions.create(**payload, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == 40
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]].count("length") == 1
    assert len({chunk.id for chunk in chunks}) == 1


def mostly_drafted(answer):
    """Return an answer if most of it was drafted. While drafting is not worthwhile, as on a busy machine, little is."""
    return answer if answer.usage.model_dump()["draft"]["accepted_tokens"] > 30 else None


def test_repeats_are_drafted_and_reported(client, http):
    payload = {"model": MODEL, "prompt": PROMPT + "pivot", "max_tokens": 60, "temperature": 0}
    first = client.completions.create(**payload)
    second = eventually(lambda: mostly_drafted(client.completions.create(**payload)))
    assert first.choices[0].text == second.choices[0].text
    draft = second.usage.model_dump()["draft"]
    assert draft["tokens_per_step"] > 2
    assert second.usage.completion_tokens_details.accepted_prediction_tokens == 0  # There was no prediction.
    predicted = {"prediction": {"type": "content", "content": first.choices[0].text}}
    again = eventually(lambda: mostly_drafted(client.completions.create(**payload, extra_body=predicted)))
    assert again.usage.completion_tokens_details.accepted_prediction_tokens > 0
    without = client.completions.create(**payload, extra_body={"max_draft": 0})
    assert without.choices[0].text == first.choices[0].text
    assert without.usage.model_dump()["draft"]["drafted_tokens"] == 0
    again = client.completions.create(**payload, extra_body={"return_drafted": True})
    pieces = again.choices[0].model_dump()["pieces"]
    assert "".join(text for text, _ in pieces) == first.choices[0].text
    assert any(is_drafted for _, is_drafted in pieces)
    assert metric(http, "vllm:spec_decode_num_accepted_tokens_total") >= draft["accepted_tokens"]


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


def test_chats_use_the_models_template(client):
    messages = [{"role": "system", "content": "sort"}, {"role": "user", "content": "a list"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=20, temperature=0)
    text = "# system: sort\n# user: a list\n# answer\n"
    prompt = Tokenizer(SHIPPED_MODEL).encode(text, add_special_tokens=False).tolist()
    raw = client.completions.create(model=MODEL, prompt=prompt, max_tokens=20, temperature=0)
    assert answer.choices[0].message.content == raw.choices[0].text
    assert answer.usage.prompt_tokens == raw.usage.prompt_tokens
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=messages, max_completion_tokens=20, temperature=0, stream=True
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == raw.choices[0].text
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=[])


def test_unknown_routes_return_errors_in_the_same_format(http):
    assert http.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert http.get("/v1/completions").status_code == 405
    assert "message" in http.get("/v1/completions").json()["error"]


def test_requests_of_disconnected_clients_are_cancelled(http, server):
    payload = {"model": MODEL, "prompt": PROMPT, "max_tokens": 900, "temperature": 1, "ignore_eos": True}
    generated = metric(http, "vllm:generation_tokens_total")
    with http.stream("POST", "/v1/completions", json=payload | {"stream": True}) as stream:
        next(stream.iter_lines())
    eventually(lambda: metric(http, "vllm:num_requests_running") == 0)
    assert metric(http, "vllm:generation_tokens_total") < generated + 900
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(payload).encode()
    with socket.create_connection((host, int(port))) as caller:
        caller.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        eventually(lambda: metric(http, "vllm:num_requests_running") == 1)
    eventually(lambda: metric(http, "vllm:num_requests_running") == 0)


def test_two_hundred_streams_at_once(server):
    async def one(client, number):
        text = ""
        async for chunk in await client.completions.create(
            model=MODEL, prompt=f"def function_{number}(", max_tokens=12, temperature=0, stream=True
        ):
            text += chunk.choices[0].text
        return text

    async def main():
        limits = httpx.Limits(max_connections=None)
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=httpx.AsyncClient(limits=limits)
        ) as client:
            return await asyncio.gather(*(one(client, number % 50) for number in range(200)))

    texts = asyncio.run(asyncio.wait_for(main(), 2 * TIMEOUT_S))
    assert all(texts)
    assert texts[:50] == texts[50:100] == texts[100:150] == texts[150:]


def test_health_and_metrics(http):
    http.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, "max_tokens": 2}).raise_for_status()
    assert http.get("/health").json() == {"status": "ok"}
    assert metric(http, "vllm:prompt_tokens_total") > 0
    assert metric(http, "vllm:time_to_first_token_seconds_count") > 0
    figures = http.get("/figures").json()
    assert figures["generated_tokens"] == metric(http, "vllm:generation_tokens_total")


PAGE = "https://page.example"


def test_keys_allowed_origins_and_a_full_queue(folder, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsecret\n")
    arguments = ("--api-keys", str(keys), "--cors-origin", PAGE, "--max-sequences", "1", "--max-waiting", "1")
    with serving(*arguments, *NO_DRAFTS, model=folder) as server:
        http = server.http
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for origin, allowed in ((PAGE, PAGE), ("https://other.example", None)):
            # Browsers send no key with this request.
            answer = http.options("/v1/completions", headers={"Origin": origin} | asked)
            assert answer.is_success == (allowed is not None)
            for status, key in ((200, "secret"), (401, "wrong")):
                headers = {"Origin": origin, "Authorization": f"Bearer {key}"}
                got = http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=headers)
                assert got.status_code == status
                assert got.headers.get("access-control-allow-origin") == allowed
        payload = {"model": MODEL, "prompt": PROMPT, "max_tokens": 900, "temperature": 1, "ignore_eos": True}
        assert http.post("/v1/completions", json=payload).status_code == 401
        http.headers["Authorization"] = "Bearer secret"
        assert http.post("/v1/completions", json=payload | {"n": 3}).status_code == 400
        with http.stream("POST", "/v1/completions", json=payload | {"stream": True, "n": 2}) as stream:
            lines = stream.iter_lines()
            next(lines)
            refused = httpx.post(f"{server.url}/v1/completions", json=payload, headers=http.headers)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        eventually(lambda: metric(http, "vllm:num_requests_running") == 0)


def test_requests_are_answered_while_the_model_is_loaded_and_an_idle_server_stops_without_waiting(folder):
    command = [sys.executable, "-m", "engine.commands.main", "serve", "--model", str(folder), "--port", "0", *NO_DRAFTS]
    command += ["--kv-memory", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = re.search(r"http://\S+", process.stdout.readline())[0]
            early = httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "x"}, timeout=TIMEOUT_S)
            assert (early.status_code, early.headers["retry-after"]) == (503, "5")
            assert "the model has been loading for " in early.json()["error"]["message"]
            # No connection is refused meanwhile.
            answers = eventually(lambda: (got := httpx.get(f"{url}/health", timeout=TIMEOUT_S)).is_success and got)
            assert answers.json() == {"status": "ok"}
            printed = "".join(takewhile(lambda line: line != f"serving at {url}\n", process.stdout))
            cause = "as many as --kv-memory 4 holds; 13 would hold the model's 2048"
            assert re.search(rf"^context window: \d+ tokens \({cause}\)$", printed, re.MULTILINE)
            process.send_signal(signal.SIGINT)
            assert process.wait(TIMEOUT_S) == 0
            assert process.stdout.read() == "stopping\n"
        finally:
            process.kill()


def test_an_interruption_while_the_model_is_loaded_is_one_line(folder):
    command = [sys.executable, "-m", "engine.commands.main", "serve", "--model", str(folder), "--port", "0", *NO_DRAFTS]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Programs that run in the background ignore SIGINT, and so would the server.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
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


def test_streams_finish_after_a_signal_to_stop(folder):
    with serving("--drafter", "none", model=folder) as server:
        http = server.http
        payload = {"model": MODEL, "prompt": PROMPT, "max_tokens": 200, "temperature": 0, "stream": True}
        payload["structured_outputs"] = {"regex": "[a-z]{1000}"}  # The process that checks grammars runs, too.
        with http.stream("POST", "/v1/completions", json=payload) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert len(running_in(server.process.pid)) > 3  # HTTP, engine, resource tracker and that process.
            os.killpg(server.process.pid, signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(TIMEOUT_S) == 0
        eventually(lambda: not running_in(server.process.pid))
        assert "waiting up to 30 s for running requests" in server.process.stdout.read()


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
    with serving("--drafter", "none", model=folder) as server:
        http = server.http
        payload = {"model": MODEL, "prompt": PROMPT, "max_tokens": 900, "temperature": 1, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=payload | {"stream": True}) as stream:
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


def test_a_killed_engine_ends_streams_and_the_server(folder):
    with serving("--drafter", "none", model=folder) as server:
        http = server.http
        payload = {"model": MODEL, "prompt": PROMPT, "max_tokens": 900, "temperature": 1, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=payload | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(newest_child(server.process.pid), signal.SIGKILL)
            assert any("the engine has stopped" in line for line in lines)
        assert server.process.wait(TIMEOUT_S) == 2


def test_the_http_process_does_not_import_pytorch():
    script = "import sys, engine.api.server; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
    )


def test_an_engine_that_starts_before_its_sidecar_connects_later(socket_address):
    remote = ("--drafter", "ssd-remote", "--address", socket_address)
    with serving(*remote) as server, client_of(server) as client:
        payload = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
        text = client.completions.create(**payload).choices[0].text
        line = server.process.stderr.readline()
        assert line.startswith(f"warning: no connection to the drafter at {socket_address} (")
        with served("--listen", socket_address, "--capacity", "100k"):
            drafted = eventually(lambda: drafts_in(client.completions.create(**payload), text))
            assert drafted > 0
            for _ in range(GOOD_RESPONSES):
                client.completions.create(**payload | {"max_tokens": 2})
            line = server.process.stderr.readline()
            assert line == f"warning: reconnected to the drafter at {socket_address}; drafting resumes\n"


def drafts_in(answer, text):
    """Return the number of draft tokens of an answer, which has this text."""
    assert answer.choices[0].text == text
    return answer.usage.model_dump()["draft"]["drafted_tokens"]
