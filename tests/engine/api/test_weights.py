"""A server whose weights are replaced while it runs."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.shipped import SHIPPED_MODEL
from tests.engine.api.serving import complete

FILE = "model.safetensors"
BODY = {"prompt": "def quicksort(items):", "max_tokens": 32, "temperature": 0, "learn": False}
"""Not learned, and so not answered from the corpus."""


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


def update(http, path, **fields):
    return http.post("/v1/weights", json={"path": str(path), **fields})


def test_outputs_follow_the_weights(http, folders):
    old = complete(http, **BODY)[0]
    answer = update(http, folders / "new", version=12)
    assert (answer.status_code, answer.json()) == (200, {"version": 12})
    new = complete(http, **BODY)[0]
    assert update(http, folders / "old" / FILE).json() == {"version": 13}
    assert complete(http, **BODY)[0] == old != new


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("cut.safetensors", {}, "cut.safetensors is damaged or cut short"),
        ("absent", {}, "absent is neither a folder nor a .safetensors file that can be read; give one of these"),
        ("", {}, "has no model.safetensors"),
        ("new", {"version": -1}, "version: "),
        ("new", {"group": "g"}, "group"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(http, folders, path, fields, message):
    answer = update(http, folders / path, **fields)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_a_server_without_the_flag_refuses(server, folders):
    answer = update(server.http, folders / "new")
    assert answer.status_code == 403
    assert answer.json()["error"]["type"] == "permission_error"
    assert "--allow-weight-updates" in answer.json()["error"]["message"]
