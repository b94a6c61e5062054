"""Options of `ssd-engine serve`: addresses, adapters, tensor parallelism, formats of tool calls."""

import asyncio
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.api import server
from engine.api.server import ServerConfig
from engine.api.tool_formats import FORMATS
from engine.commands.main import cli
from engine.commands.options import EngineOptions
from ssd.errors import UserError
from tests.descriptors import check_accepting
from tests.engine.api.serving import MODEL, TIMEOUT_S, eventually, metric, newest_child, serving
from tests.engine.conftest import make_folder


def test_without_free_descriptors_few_attempts_to_accept_are_made(monkeypatch):
    async def app(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    async def test():
        bound = server.bind("127.0.0.1", 0)

        def connect():
            connection = socket.create_connection(bound.getsockname(), TIMEOUT_S)
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return connection

        running = server._uvicorn_server(app)
        serving = asyncio.create_task(running.serve(sockets=[bound]))
        await check_accepting(connect, monkeypatch)
        running.should_exit = True
        await serving

    asyncio.run(test())


ADAPTERS = EngineOptions(loras={MODEL: Path("absent")})


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        (
            EngineOptions(),
            {"port": "occupied"},
            r"cannot listen on 127.0.0.1:\d+: Address already in use; give another",
        ),
        # 192.0.2.0/24 is reserved for documentation.
        (EngineOptions(), {"host": "192.0.2.1"}, "Cannot assign requested address"),
        (EngineOptions(), {"tool_call_parser": "hermes"}, "the chat template of .*stdlib-7m does not use tools"),
        (
            EngineOptions(drafter="ssd-remote"),
            {"answer_repeats": True},
            "--answer-repeats needs the corpus of --drafter",
        ),
        (ADAPTERS, {}, f"--lora {MODEL}: the model has this name"),
        (EngineOptions(), {"api_keys": Path("/absent")}, "--api-keys: cannot read /absent: No such file"),
        (EngineOptions(), {"api_keys": Path("/dev/null")}, "--api-keys: /dev/null has no key"),
    ],
    ids=["port", "address", "tools", "repeats", "adapter", "keys", "no keys"],
)
def test_what_cannot_be_served_is_refused_before_the_model_is_loaded(monkeypatch, options, config, message):
    monkeypatch.setattr(server, "EngineProcess", lambda _: pytest.fail("an engine was made"))
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1] if config.get("port") == "occupied" else 0
        with pytest.raises(UserError, match=message):
            asyncio.run(server.serve(options, ServerConfig(**config | {"port": port}), MODEL, print))


@pytest.mark.parametrize(
    ("loras", "message"), [(["a"], "must be NAME=FOLDER, not 'a'"), (["a=x", "a=y"], "--lora a=y: a was given before")]
)
def test_unusable_names_of_adapters_are_refused(loras, message):
    result = CliRunner().invoke(cli, ["serve", *(part for lora in loras for part in ("--lora", lora))])
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_format_of_tool_calls_is_that_of_the_chat_template_unless_it_is_given(tmp_path):
    assert server.find_tool_format(tmp_path, None) is None
    (tmp_path / "chat_template.jinja").write_text("{{ tools }}<tool_call>")
    assert server.find_tool_format(tmp_path, None) is FORMATS["hermes"]
    assert server.find_tool_format(tmp_path, "mistral") is FORMATS["mistral"]
    (tmp_path / "chat_template.jinja").write_text("<tool_call>")
    assert server.find_tool_format(tmp_path, None) is None


BODY = {"prompt": "def chosen(items):", "max_tokens": 12, "temperature": 0, "learn": False}


def test_requests_choose_an_adapter_as_their_model(optional):
    models = (MODEL, "a", "b", "a", MODEL)
    answers = [optional.post("/v1/completions", json=BODY | {"model": name}).json() for name in models]
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert [answer["model"] for answer in answers] == [*models]
    assert len(set(texts)) == 3
    assert texts[3:] == [texts[1], texts[0]]


def test_adapters_are_listed_and_unknown_ones_are_not_found(optional):
    entries = optional.get("/v1/models").json()["data"]
    assert [(entry["id"], entry.get("parent")) for entry in entries] == [(MODEL, None), ("a", MODEL), ("b", MODEL)]
    assert optional.get("/v1/models/b").json() == entries[2]
    answer = optional.post("/v1/completions", json=BODY | {"model": "c"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert f"this server has '{MODEL}', 'a', 'b'" in answer.json()["error"]["message"]
    assert optional.get("/v1/models/c").status_code == 404


NAME = "experts"
ASKED = {"model": NAME, "prompt": "def add(left, right):", "max_tokens": 12, "temperature": 0}
LONG = ASKED | {"max_tokens": 30_000, "temperature": 1, "ignore_eos": True}
REASON = "the engine has stopped: rank 1 of 2 was killed by SIGKILL"


def test_clients_are_served_until_a_rank_is_killed(tmp_path):
    make_folder(tmp_path / NAME, family="mixtral", num_local_experts=4, max_position_embeddings=1 << 15)
    with (
        serving("--drafter", "ssd", "--tensor-parallel", "2", model=tmp_path / NAME) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        http = server.http
        whole = http.post("/v1/completions", json=ASKED).json()["choices"][0]["text"]
        assert whole
        waiting = pool.submit(http.post, "/v1/completions", json=LONG)
        eventually(lambda: metric(http, "vllm:num_requests_running") == 1)
        with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(newest_child(newest_child(server.process.pid)), signal.SIGKILL)  # Rank 1.
            assert any(REASON in line for line in lines)
        assert waiting.result().status_code == 503
        assert REASON in waiting.result().json()["error"]["message"]
        assert server.process.wait(TIMEOUT_S) == 2
        errors = server.process.stderr.read()
        assert errors.startswith(f"error: {REASON}")
        assert errors.count("\n") == 1
