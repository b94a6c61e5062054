"""Requests and models of vLLM in terms of the session layer."""

import json
from threading import Event
from types import SimpleNamespace

import pytest

from drafter_service.client.identity import fingerprint
from drafter_service.plugins.options import End
from drafter_service.plugins.vllm.requests import OptionsReader, end_of, settings_of
from tests.drafter_service.plugins.vllm.fake_vllm import Request, RequestStatus
from tests.drafter_service.raw import eventually


@pytest.fixture
def warnings():
    return []


def test_each_finished_status_has_an_end():
    ends = {status.name: end_of(status.name) for status in RequestStatus if status > RequestStatus.PREEMPTED}
    assert ends == {
        "FINISHED_STOPPED": End.FINISHED,
        "FINISHED_LENGTH_CAPPED": End.FINISHED,
        "FINISHED_REPETITION": End.FINISHED,
        "FINISHED_ABORTED": End.ABORTED,
        "FINISHED_IGNORED": End.CANCELLED,
        "FINISHED_ERROR": End.CANCELLED,
    }


def test_options_of_a_request():
    request = Request("a", [1, 2], max_tokens=7, cache_salt="s", session_id="chat")
    reader = OptionsReader(print)
    options = reader.options_of(request)
    assert (options.max_tokens, options.salt, options.session, options.adapter) == (7, "s", "chat", "")
    assert not options.has_stop_strings
    request.sampling_params.stop = ["\n"]
    assert reader.options_of(request).has_stop_strings
    request.prompt_embeds = object()
    assert reader.options_of(request) is None


def test_a_request_has_no_drafts_while_its_adapter_is_read(tmp_path, monkeypatch):
    may_read, request = Event(), Request("a", [1, 2], lora_request=SimpleNamespace(lora_name="a", lora_path=tmp_path))
    monkeypatch.setattr("drafter_service.plugins.vllm.requests.fingerprint", lambda _: may_read.wait(10) and "f")
    reader = OptionsReader(print)
    assert reader.options_of(request) is None
    may_read.set()
    eventually(lambda: reader.options_of(request) is not None)
    assert reader.options_of(request).adapter == "f"


def test_an_adapter_is_identified_by_its_file(tmp_path, warnings):
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"weights")
    reader = OptionsReader(warnings.append)
    assert reader.fingerprint(None) == ""
    for path, wanted in ((str(tmp_path), fingerprint(file)), ("/nonexistent", "a:/nonexistent")):
        lora = SimpleNamespace(lora_name="a", lora_path=path)
        eventually(lambda lora=lora: reader.fingerprint(lora) is not None)
        assert reader.fingerprint(lora) == wanted
    assert len(warnings) == 1


def test_a_model_is_identified_by_its_tokenizer_and_folder(tmp_path, warnings):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 4096}}))
    config = SimpleNamespace(model=str(folder), revision=None, get_vocab_size=lambda: 4096)
    identity = settings_of(config, warnings.append).model
    assert (identity.name, identity.tokenizer, identity.vocab_size) == ("model", fingerprint(folder), 4096)
    assert not warnings
