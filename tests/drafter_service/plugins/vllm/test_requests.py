"""Requests and models of vLLM in terms of the session layer."""

import json
from types import SimpleNamespace

import pytest

from drafter_service.client.identity import fingerprint
from drafter_service.plugins.options import End
from drafter_service.plugins.vllm.requests import Adapters, end_of, model_identity_of, options_of
from tests.drafter_service.plugins.vllm.fake_vllm import Request, RequestStatus


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
    options = options_of(request, "adapter")
    assert (options.max_tokens, options.salt, options.session, options.adapter) == (7, "s", "chat", "adapter")
    assert not options.has_stop_strings
    request.sampling_params.stop = ["\n"]
    assert options_of(request, "").has_stop_strings


def test_an_adapter_is_identified_by_its_file(tmp_path, warnings):
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"weights")
    adapters = Adapters(warnings.append)
    assert adapters.fingerprint(None) == ""
    assert adapters.fingerprint(SimpleNamespace(lora_name="a", lora_path=str(tmp_path))) == fingerprint(file)
    for _ in range(2):
        elsewhere = SimpleNamespace(lora_name="a", lora_path="/nonexistent")
        assert adapters.fingerprint(elsewhere) == "a:/nonexistent"
    assert len(warnings) == 1


def test_a_model_is_identified_by_its_tokenizer_and_folder(tmp_path, warnings):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 4096}}))
    config = SimpleNamespace(model=str(folder), revision=None, get_vocab_size=lambda: 4096)
    identity = model_identity_of(config, warnings.append)
    assert (identity.name, identity.tokenizer, identity.vocab_size) == ("model", fingerprint(folder), 4096)
    assert not warnings
