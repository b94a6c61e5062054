"""A server with LoRA adapters: requests choose one as their model."""

import subprocess
import sys

import httpx
import pytest

from engine.models.shipped import SHIPPED_MODEL
from tests.engine.api.serving import MODEL, TIMEOUT_S, serving
from tests.engine.lora_folders import write_adapter

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
    with httpx.Client(base_url=adapter_server.url, timeout=TIMEOUT_S) as http:
        answers = [
            http.post("/v1/completions", json=BODY | {"model": name}).json() for name in (MODEL, "a", "b", "a", MODEL)
        ]
        texts = [answer["choices"][0]["text"] for answer in answers]
        assert [answer["model"] for answer in answers] == [MODEL, "a", "b", "a", MODEL]
        assert len(set(texts)) == 3
        assert texts[3:] == [texts[1], texts[0]]


def test_adapters_are_listed_and_unknown_ones_are_not_found(adapter_server):
    with httpx.Client(base_url=adapter_server.url, timeout=TIMEOUT_S) as http:
        entries = http.get("/v1/models").json()["data"]
        assert [(entry["id"], entry.get("parent")) for entry in entries] == [(MODEL, None), ("a", MODEL), ("b", MODEL)]
        assert http.get("/v1/models/b").json() == entries[2]
        answer = http.post("/v1/completions", json=BODY | {"model": "c"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert f"this server has '{MODEL}', 'a', 'b'" in answer.json()["error"]["message"]
        assert http.get("/v1/models/c").status_code == 404


def test_a_removed_adapter_ends_only_its_own_requests(adapter_server, folders):
    with httpx.Client(base_url=adapter_server.url, timeout=TIMEOUT_S) as http:

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
