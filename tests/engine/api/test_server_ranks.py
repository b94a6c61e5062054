"""The real server with a model that is divided over two processes."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.engine.api.serving import TIMEOUT_S, eventually, metric, serving
from tests.engine.conftest import make_folder

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
