"""A server whose weights are replaced while it runs."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.shipped import SHIPPED_MODEL
from tests.engine.api.serving import MODEL, complete, eventually

FILE = "model.safetensors"
SHORT = {"model": MODEL, "prompt": "def quicksort(items):", "max_tokens": 32, "temperature": 0, "learn": False}
"""Not learned, and so not answered from the corpus."""
LONG = SHORT | {"max_tokens": 400, "ignore_eos": True, "drafter": "none"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Weights of the shipped model, `old`, and others, `new`."""
    root, weights = tmp_path_factory.mktemp("weights"), load_file(SHIPPED_MODEL / FILE)
    torch.manual_seed(0)
    changed = {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in weights.items()}
    for name, tensors in (("old", weights), ("new", changed)):
        (root / name).mkdir()
        save_file(tensors, root / name / FILE)
    (root / "cut.safetensors").write_bytes((root / "new" / FILE).read_bytes()[:-100])
    return root


@pytest.fixture(scope="module")
def http(optional):
    return optional


@pytest.fixture(scope="module", params=[SHORT], ids=[""])
def texts(request, http, folders):
    """The output of a request with the old and with the new weights."""
    found = {}
    for name in ("new", "old"):
        assert update(http, folders / name).status_code == 200
        found[name] = text(http, request.param)
    assert found["old"] != found["new"]
    return found


@pytest.fixture(autouse=True)
def old_weights(http, folders):
    yield
    update(http, folders / "old")


def update(http, path, **fields):
    return http.post("/v1/weights", json={"path": str(path), **fields})


def text(http, body):
    return complete(http, **body)[0]


def streamed(lines):
    """The chunks of a stream, or its error."""
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_outputs_follow_the_weights(http, folders, texts):
    answer = update(http, folders / "new", version=12)
    assert (answer.status_code, answer.json()) == (200, {"version": 12})
    assert text(http, SHORT) == texts["new"]
    assert update(http, folders / "old" / FILE).json() == {"version": 13}
    assert text(http, SHORT) == texts["old"]


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("cut.safetensors", {}, "cut.safetensors is damaged or cut short"),
        ("absent", {}, "absent is neither a folder nor a .safetensors file that can be read; give one of these"),
        ("x" * 5000, {}, "is neither a folder nor a .safetensors file"),
        ("", {}, "has no model.safetensors"),
        ("new", {"version": -1}, "version: "),
        ("new", {"group": "g"}, "group"),
    ],
)
def test_weights_that_cannot_be_used_change_nothing(http, folders, texts, path, fields, message):
    answer = update(http, folders / path, **fields)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert text(http, SHORT) == texts["old"]


@pytest.mark.parametrize("texts", [LONG], indirect=True, ids=[""])
def test_requests_that_run_finish_with_the_old_weights(http, folders, texts):
    """One request runs while the weights change, with its text streamed, and one without a stream."""
    with (
        ThreadPoolExecutor() as threads,
        http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream,
    ):
        whole = threads.submit(text, http, LONG)
        lines = stream.iter_lines()
        first = streamed([next(lines)])
        eventually(lambda: http.get("/figures").json()["running"] == 2 or whole.done())
        has_started = not whole.done()
        updated = update(http, folders / "new")
        chunks = first + streamed(lines)
        assert updated.status_code == 200
        assert has_started, "the request ended before the weights changed; make it longer"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == texts["old"]
        assert whole.result() == texts["old"]


def test_a_server_without_the_flag_refuses(server, folders):
    http = server.http
    answer = update(http, folders / "new")
    assert answer.status_code == 403
    assert answer.json()["error"]["type"] == "permission_error"
    assert "--allow-weight-updates" in answer.json()["error"]["message"]
