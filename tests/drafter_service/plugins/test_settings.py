"""Settings that users of a host give, and the identity of the model that it serves."""

import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from drafter_service.auth.connector import ClientAccess
from drafter_service.client.identity import model_identity
from drafter_service.observability.facts import ModelIdentity
from drafter_service.plugins.settings import (
    SETTINGS,
    PluginSettings,
    host_settings,
    identity_of,
    look_for_sidecar,
    name_and_version,
    read_settings,
)
from drafter_service.plugins.vllm import NullProposer
from ssd.errors import UserError
from tests.drafter_service.client_wire import counting
from tests.drafter_service.fake_server import FakeService, fake_server_thread

HOSTS = Path(__file__).parents[3] / "docs" / "hosts.md"
MODEL = ModelIdentity(name="m", vocab_size=50)


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text('{"vocab_size": 50}')
    return folder


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Return a function that sets the variable, which is not set before."""
    monkeypatch.delenv("SSD_PLUGIN", raising=False)
    return lambda text: monkeypatch.setenv("SSD_PLUGIN", text)


def test_settings_are_read_from_json_values():
    values = {"sidecar": "embedded", "folder": "/m", "access": {"token": "/t", "allow_plaintext": True}}
    access = ClientAccess(token=Path("/t"), allow_plaintext=True)
    assert read_settings(values) == PluginSettings("embedded", folder=Path("/m"), access=access)
    assert read_settings({"access": access, "folder": Path("/m")}) == PluginSettings(folder=Path("/m"), access=access)
    assert read_settings({}) == PluginSettings()


def test_given_settings_precede_those_of_the_environment_and_these_the_defaults(environment):
    environment('{"sidecar": "drafter:50051", "namespace": "chat"}')
    assert read_settings({"namespace": "sql"}, deadline_s=0.5) == PluginSettings("drafter:50051", "sql", deadline_s=0.5)
    environment('{"deadline_s": 0.1}')
    assert read_settings({}, deadline_s=0.5).deadline_s == 0.1


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"adress": "x"}, "there is no setting adress; did you mean access?"),
        ({"model": "m"}, "there is no setting model; "),
        ({"model": {"name": "m"}}, "there is no setting model.name; "),
        ({"capacity": 100}, r"capacity: .* 4096"),
        ({"capacity": 1 << 33}, r"capacity: .* 4042321904"),
        ({"deadline_s": 0}, r"deadline_s: .* 0"),
        ({"access": {"key": "k"}}, "needs certificate"),
        ({"engine": "my engine"}, "engine 'my engine' is not a name of an engine; use at most 128 letters"),
        (
            {"sidecar": "/tmp/ssd-drafter.sock"},
            "sidecar: '/tmp/ssd-drafter.sock' is not an address; give unix:/",
        ),
    ],
)
def test_unreadable_settings_are_named(environment, values, reason):
    with pytest.raises(UserError, match=reason):
        read_settings(values)
    environment(json.dumps(values))
    with pytest.raises(UserError, match=reason):
        read_settings({})


@pytest.mark.parametrize(("text", "reason"), [("{", "is not JSON"), ('["embedded"]', "must be an object")])
def test_an_environment_without_settings_is_refused(environment, text, reason):
    environment(text)
    with pytest.raises(UserError, match=f"variable SSD_PLUGIN.* {reason}"):
        read_settings({})


def test_the_documentation_lists_all_settings():
    table = HOSTS.read_text().partition("\n## Settings\n")[2].partition("\n### ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [*SETTINGS.settings]


def test_settings_of_a_host_identify_its_model(model_folder):
    settings = host_settings({"folder": str(model_folder)}, "numpy", "owner/model", 50, pytest.fail)
    assert settings.model == model_identity(model_folder)
    assert settings.host == f"numpy/{np.__version__}"


def test_a_model_is_identified_by_its_folder_or_by_the_cache_of_the_hub(tmp_path, model_folder, monkeypatch):
    identity, reports = model_identity(model_folder), []
    assert identity_of(str(model_folder), 50, reports.append) == identity
    assert identity_of("owner/model", 50, reports.append, folder=model_folder) == identity

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc\n")
    (repository / "snapshots").mkdir()
    model_folder.rename(repository / "snapshots" / "abc")
    for revision in ("", "main", "abc"):
        cached = identity_of("owner/model", 50, reports.append, revision=revision)
        assert (cached.name, cached.tokenizer) == ("owner/model", identity.tokenizer)
    assert not reports


def test_a_model_without_readable_files_is_identified_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    reports = []
    assert identity_of("owner/model", 50, reports.append) == ModelIdentity(name="owner/model", vocab_size=50)
    assert not reports
    assert identity_of("m", 50, reports.append, folder=tmp_path) == MODEL
    assert "named after the model's name alone" in reports[0]


def test_the_version_of_a_host_is_that_of_its_package_or_of_its_module(monkeypatch):
    assert name_and_version("numpy") == f"numpy/{np.__version__}"
    assert name_and_version("renamed_host") == "renamed_host"
    monkeypatch.setitem(sys.modules, "renamed_host", SimpleNamespace(__version__="1.2"))
    assert name_and_version("renamed_host") == "renamed_host/1.2"


def test_an_absent_sidecar_is_reported_before_the_model_is_loaded(socket_address):
    reports = []
    look_for_sidecar(PluginSettings("embedded"), pytest.fail)
    look_for_sidecar(PluginSettings(socket_address), reports.append)
    look_for_sidecar(PluginSettings(socket_address, drafting="sidecar"), reports.append)
    for line, rest in zip(reports, ("with drafts from running requests alone", "without drafts"), strict=True):
        assert line.startswith(f"no drafter answers at {socket_address} (No such file or directory); start one with")
        assert line.endswith(f"; continuing {rest} until there is one")
    with fake_server_thread(socket_address, FakeService(counting)):
        look_for_sidecar(PluginSettings(socket_address), pytest.fail)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_worker_of_vllm_looks_for_the_sidecar(environment, socket_address, caplog, rank):
    environment(json.dumps({"sidecar": socket_address}))
    NullProposer(SimpleNamespace(parallel_config=SimpleNamespace(rank=rank)))
    assert [record.name for record in caplog.records] == ["vllm.ssd_drafter"] * (rank == 0)
    environment('{"sidecar": "nowhere"}')
    with pytest.raises(UserError, match="is not an address") if rank == 0 else nullcontext():
        NullProposer(SimpleNamespace(parallel_config=SimpleNamespace(rank=rank)))
