import hashlib
import json

import pytest

from drafter_service.client.identity import model_identity
from ssd.errors import UserError


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(b"tokens")
    (folder / "config.json").write_text(json.dumps({"vocab_size": 4096}))
    return folder


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def test_the_identity_is_read_from_the_folder(folder, monkeypatch):
    identity = model_identity(folder)
    assert (identity.name, identity.vocab_size) == ("some-model", 4096)
    assert (identity.tokenizer, identity.adapter) == (sha256(b"tokens"), "")
    monkeypatch.chdir(folder)
    assert model_identity(folder.joinpath(".").relative_to(folder)) == identity


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("models--Org--Some-Model-1.5B/snapshots/8f3a2b", "Org/Some-Model-1.5B"),
        ("models--gpt2/snapshots/8f3a2b", "gpt2"),
        ("snapshots/8f3a2b", "8f3a2b"),
        ("models--Org--Model/others/8f3a2b", "8f3a2b"),
        ("models--Org--Model", "models--Org--Model"),
    ],
)
def test_a_folder_in_the_hubs_cache_has_the_name_of_its_repository(folder, tmp_path, place, name):
    moved = tmp_path / "hub" / place
    moved.parent.mkdir(parents=True)
    folder.rename(moved)
    assert model_identity(moved).name == name


def test_an_adapter_has_a_fingerprint(folder, tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    assert model_identity(folder, adapter=tmp_path).adapter == sha256(b"weights")


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json"])
def test_folders_without_a_file_are_refused(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(UserError, match=missing):
        model_identity(folder)


@pytest.mark.parametrize("config", ["{}", "[]", "nonsense", '{"vocab_size": "many"}'])
def test_a_config_without_a_vocabulary_is_refused(folder, config):
    (folder / "config.json").write_text(config)
    with pytest.raises(UserError, match="vocab_size"):
        model_identity(folder)


def test_an_adapter_without_weights_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match=r"adapter_model\.safetensors"):
        model_identity(folder, adapter=tmp_path)
