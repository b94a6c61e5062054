"""The identity of a model, which is read from its files."""

import hashlib
import json
from dataclasses import replace

import pytest

from drafter_service.client.identity import gguf_identity, model_identity
from drafter_service.server.naming import default_name
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
    assert model_identity(folder.joinpath(".").relative_to(folder)) == model_identity(str(folder)) == identity
    with pytest.raises(UserError, match=f"there is no model folder {folder}/none; give"):
        model_identity(folder / "none")


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


def saved(folder, tokenizer, **config):
    """Write a model folder; return its identity without what depends on the files' form or place."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=len(folder.name)))
    (folder / "config.json").write_text(json.dumps(config))
    return replace(model_identity(folder), name="", tokenizer="")


BPE = {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}}
CONFIG = {"model_type": "llama", "vocab_size": 4, "hidden_size": 8, "num_hidden_layers": 2}


def test_the_content_decides(tmp_path):
    special = {"added_tokens": [{"id": 3, "content": "<s>"}]}
    base = saved(tmp_path / "a", BPE | special, **CONFIG, torch_dtype="float16", _name_or_path="x")
    assert base.configuration.startswith("llama:")
    # As another version of transformers saves the same model.
    model = {"vocab": {"ab": 2, "b": 1, "a": 0}, "ignore_merges": False, "merges": [["a", "b"]]}
    later = {
        "truncation": {"max_length": 5},
        "model": model,
        "added_tokens": [{"id": 3, "content": "<s>", "lstrip": False}],
    }
    incidental = {"transformers_version": "5", "dtype": "bfloat16", "rope_parameters": {}, "quantization_config": {}}
    assert saved(tmp_path / "other", later, **incidental, **CONFIG, max_position_embeddings=9) == base
    unigram = {"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.5], ["ab", -2.0]]}}
    assert saved(tmp_path / "b", unigram | special, **CONFIG) == base
    # Other models.
    assert (
        saved(tmp_path / "c", BPE | {"added_tokens": [{"id": 3, "content": "<e>"}]}, **CONFIG).vocabulary
        != base.vocabulary
    )
    for changed in ({"num_hidden_layers": 3}, {"vocab_size": 5}, {"model_type": "qwen2"}, {"intermediate_size": 9}):
        assert saved(tmp_path / "d", BPE, **CONFIG | changed).configuration != base.configuration


def test_a_multimodal_model_has_the_configuration_of_its_text_model(tmp_path):
    text = {name: value for name, value in CONFIG.items() if name != "model_type"}
    first = saved(tmp_path / "a", BPE, model_type="llava", text_config=text)
    assert (first.vocab_size, first.configuration.partition(":")[0]) == (4, "llava")
    assert saved(tmp_path / "b", BPE, model_type="llava", text_config=text | {"hidden_size": 9}) != first


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"model": {"vocab": 5}}', '{"model": {"vocab": {"a": "b"}}, "added_tokens": 5}']
)
def test_a_tokenizer_that_cannot_be_read_is_told_apart_by_its_file(folder, content):
    (folder / "tokenizer.json").write_text(content)
    assert model_identity(folder).vocabulary == sha256(content.encode())


def test_quantizations_of_a_gguf_model_share_a_namespace():
    values = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.embedding_length": 8,
        "llama.rope.scale": 0.5,
    }
    first = gguf_identity("m.Q4", "v", 10, values | {"general.file_type": 2})
    assert (first.tokenizer, first.vocabulary, first.vocab_size) == ("v", "v", 10)
    second = gguf_identity(
        "m.Q8", "v", 10, {name: str(value) for name, value in values.items()}
    )  # As llama.cpp gives them.
    assert default_name(first) == default_name(second)
    assert gguf_identity("m.Q4", "v", 10, values | {"llama.block_count": 3}).configuration != first.configuration
    assert gguf_identity("m", "", 10, values).configuration == ""


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [
        ("tokenizer.json", None, "tokenizer.json"),
        ("config.json", None, "config.json"),
        *(("config.json", content, "vocab_size") for content in ("{}", "[]", "nonsense", '{"vocab_size": "many"}')),
    ],
)
def test_an_error_names_what_a_folder_lacks(folder, tmp_path, file, content, word):
    with pytest.raises(UserError, match=r"adapter_model\.safetensors"):
        model_identity(folder, adapter=tmp_path)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(UserError, match=word):
        model_identity(folder)
