"""Settings that users of a host give, and the identity of the model that it serves."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from drafter_service.auth.connector import ClientAccess
from drafter_service.client.identity import model_identity
from drafter_service.observability.facts import ModelIdentity
from drafter_service.plugins.namespaces import DrafterSettings
from drafter_service.plugins.settings import identity_of, name_and_version, read_settings, settings_from_environment
from ssd.errors import UserError

MODEL = ModelIdentity(name="m", vocab_size=50)


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text('{"vocab_size": 50}')
    return folder


def test_settings_are_read_from_json_values():
    values = {"ssd": "embedded", "deadline_s": 1, "capacity": 1000, "access": {"token": "/t", "allow_plaintext": True}}
    access = ClientAccess(token=Path("/t"), allow_plaintext=True)
    assert read_settings(values, MODEL) == DrafterSettings("embedded", "", MODEL, 1.0, access, 1000)
    assert read_settings({}, MODEL) == DrafterSettings(model=MODEL)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (["embedded"], "must be an object"),
        ({"adress": "x"}, "unknown setting 'adress'"),
        ({"model": "m"}, "unknown setting 'model'"),
        ({"capacity": "much"}, "setting capacity: "),
        ({"access": {"key": "k"}}, "needs certificate"),
    ],
)
def test_unreadable_settings_are_named(values, reason):
    with pytest.raises(UserError, match=reason):
        read_settings(values, MODEL)


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


def test_settings_are_read_from_the_environment(monkeypatch):
    monkeypatch.delenv("SSD_PLUGIN", raising=False)
    assert settings_from_environment(MODEL) == DrafterSettings(model=MODEL)
    monkeypatch.setenv("SSD_PLUGIN", '{"ssd": "drafter:50051"}')
    assert settings_from_environment(MODEL) == DrafterSettings("drafter:50051", model=MODEL)


@pytest.mark.parametrize(("text", "reason"), [("{", "is not JSON"), ('{"sdd": 1}', "unknown setting 'sdd'")])
def test_an_environment_that_is_not_valid_is_refused(monkeypatch, text, reason):
    monkeypatch.setenv("SSD_PLUGIN", text)
    with pytest.raises(UserError, match=f"SSD_PLUGIN:? {reason}"):
        settings_from_environment(MODEL)


def test_the_version_of_a_host_is_that_of_its_package_or_of_its_module(monkeypatch):
    assert name_and_version("numpy") == f"numpy/{np.__version__}"
    assert name_and_version("renamed_host") == "renamed_host"
    monkeypatch.setitem(sys.modules, "renamed_host", SimpleNamespace(__version__="1.2"))
    assert name_and_version("renamed_host") == "renamed_host/1.2"
