"""Options of `ssd-engine serve`: addresses, adapters, tensor parallelism, formats of tool calls."""

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

import httpx
import pytest

from engine.api import server
from engine.api.server import ServerConfig
from engine.api.tool_formats import FORMATS
from engine.commands.options import EngineOptions
from engine.models.shipped import SHIPPED_MODEL
from ssd.errors import UserError
from tests.engine.api.serving import MODEL, TIMEOUT_S, eventually, metric, serving
from tests.engine.conftest import make_folder
from tests.engine.lora_folders import write_adapter

OPTIONS = EngineOptions(**dict.fromkeys(field.name for field in fields(EngineOptions)))


def failing(number):
    def bind(_, __):
        raise OSError(number, os.strerror(number))

    return bind


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EADDRINUSE, "the port is in use"),
        (errno.EADDRNOTAVAIL, "does not have that address"),
        (errno.EACCES, "may not listen on that port"),
        (errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT)),
    ],
)
def test_each_bind_error_has_its_own_advice(monkeypatch, number, advice):
    monkeypatch.setattr(socket.socket, "bind", failing(number))
    with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:80: .*{advice}"):
        server.bind("127.0.0.1", 80)


def test_a_port_in_use_is_reported_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr(server, "EngineProcess", lambda _: pytest.fail("an engine was made"))
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        config = ServerConfig(port=occupied.getsockname()[1])
        with pytest.raises(UserError, match="the port is in use"):
            asyncio.run(server.serve(OPTIONS, config, "m", print))


def test_a_parser_of_tool_calls_needs_a_chat_template_with_tools(monkeypatch):
    monkeypatch.setattr(server, "EngineProcess", lambda _: pytest.fail("an engine was made"))
    config = ServerConfig(port=0, tool_call_parser="hermes")
    with pytest.raises(UserError, match=r"--tool-call-parser: the chat template of .*stdlib-7m does not use tools"):
        asyncio.run(server.serve(replace(OPTIONS, model=SHIPPED_MODEL, loras={}), config, "m", print))


def test_the_format_of_tool_calls_is_that_of_the_chat_template_unless_it_is_given(tmp_path):
    assert server.find_tool_format(tmp_path, None) is None
    (tmp_path / "chat_template.jinja").write_text("{{ tools }}<tool_call>")
    assert server.find_tool_format(tmp_path, None) is FORMATS["hermes"]
    assert server.find_tool_format(tmp_path, "mistral") is FORMATS["mistral"]
    (tmp_path / "chat_template.jinja").write_text("<tool_call>")
    assert server.find_tool_format(tmp_path, None) is None


def test_an_address_of_another_machine_is_not_called_in_use():
    # 192.0.2.0/24 is reserved for documentation.
    with pytest.raises(UserError, match="does not have that address"):
        server.bind("192.0.2.1", 0)


BODY = {"prompt": "def chosen(items):", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("ab"):
        write_adapter(root / name, SHIPPED_MODEL, seed=seed)
    return root


@pytest.fixture(scope="module")
def adapter_server(folders):
    adapters = [f"--lora={name}={folders / name}" for name in "ab"]
    with serving("--max-loras", "1", *adapters) as server:
        yield server


def test_requests_choose_an_adapter_as_their_model(adapter_server):
    http = adapter_server.http
    answers = [
        http.post("/v1/completions", json=BODY | {"model": name}).json() for name in (MODEL, "a", "b", "a", MODEL)
    ]
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert [answer["model"] for answer in answers] == [MODEL, "a", "b", "a", MODEL]
    assert len(set(texts)) == 3
    assert texts[3:] == [texts[1], texts[0]]


def test_adapters_are_listed_and_unknown_ones_are_not_found(adapter_server):
    http = adapter_server.http
    entries = http.get("/v1/models").json()["data"]
    assert [(entry["id"], entry.get("parent")) for entry in entries] == [(MODEL, None), ("a", MODEL), ("b", MODEL)]
    assert http.get("/v1/models/b").json() == entries[2]
    answer = http.post("/v1/completions", json=BODY | {"model": "c"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert f"this server has '{MODEL}', 'a', 'b'" in answer.json()["error"]["message"]
    assert http.get("/v1/models/c").status_code == 404


def test_a_removed_adapter_ends_only_its_own_requests(adapter_server, folders):
    http = adapter_server.http

    def ask(name, prompt, **more):
        return http.post("/v1/completions", json=BODY | {"model": name, "prompt": prompt} | more)

    ask("a", "takes the place of b in memory")
    (folders / "b").rename(folders / "moved")
    refused = ask("b", "one")
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "the adapter b cannot be read; see the engine's log"
    streamed = ask("b", "two", stream=True).text
    assert "the adapter b cannot be read" in streamed
    assert str(folders) not in streamed
    assert ask("a", "three").status_code == 200
    (folders / "moved").rename(folders / "b")
    assert ask("b", "four").status_code == 200


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("a=absent", "error: --lora a: there is no folder absent; give one that PEFT's save_pretrained wrote"),
        (f"{MODEL}=absent", f"--lora {MODEL}: the model has"),
    ],
)
def test_a_server_with_a_bad_adapter_does_not_start(option, message):
    command = [sys.executable, "-m", "engine.commands.main", "serve", "--port", "0", "--lora", option]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert message in line


NAME = "experts"
ASKED = {"model": NAME, "prompt": "def add(left, right):", "max_tokens": 12, "temperature": 0}
LONG = ASKED | {"max_tokens": 30_000, "temperature": 1, "ignore_eos": True}
REASON = "the engine has stopped: rank 1 of 2 was killed by SIGKILL"


def test_clients_are_served_until_a_rank_is_killed(tmp_path):
    make_folder(tmp_path / NAME, family="mixtral", num_local_experts=4, max_position_embeddings=1 << 15)
    with (
        serving("--drafter", "ssd", "--tensor-parallel", "2", model=tmp_path / NAME) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http,
        ThreadPoolExecutor(1) as pool,
    ):
        whole = http.post("/v1/completions", json=ASKED).json()["choices"][0]["text"]
        with http.stream("POST", "/v1/completions", json=ASKED | {"stream": True}) as stream:
            chunks = [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if "{" in line]
        assert whole
        assert whole == "".join(chunk["choices"][0]["text"] for chunk in chunks)

        waiting = pool.submit(http.post, "/v1/completions", json=LONG)
        eventually(lambda: metric(http, "vllm:num_requests_running") == 1)
        with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(rank_of(server.process), signal.SIGKILL)
            assert any(REASON in line for line in lines)
        assert waiting.result().status_code == 503
        assert REASON in waiting.result().json()["error"]["message"]
        assert server.process.wait(TIMEOUT_S) == 2
        errors = server.process.stderr.read()
        assert errors.startswith(f"error: {REASON}")
        assert errors.count("\n") == 1


def rank_of(process):
    """Return the process id of rank 1: the child of the engine process that was started last."""
    return newest_child(newest_child(process.pid))


def newest_child(pid):
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[-1])
