"""What the plug-in reads from vLLM's configurations and requests, as far as no vLLM is needed."""

from threading import Event
from types import SimpleNamespace
from unittest import mock

import pytest

import drafter_service.plugins.vllm as plugin
from drafter_service.client.identity import fingerprint, process_name
from drafter_service.plugins.vllm.engine import OptionsReader, engine_name, padding_of
from tests.drafter_service.raw import eventually


@pytest.mark.parametrize("count", [0, 1, 256, 257, 1000])
def test_a_limited_number_of_sizes_of_cuda_graphs_is_reported(count):
    graphs = SimpleNamespace(
        cudagraph_mode=SimpleNamespace(name="FULL"), cudagraph_capture_sizes=[*range(1, count + 1)]
    )
    sizes = padding_of(graphs).sizes
    assert len(sizes) == min(count, 256) or count // 2 - 256 < len(sizes) <= 256
    assert list(sizes) == sorted(sizes)
    assert not sizes or sizes[-1] == count
    assert padding_of(SimpleNamespace(cudagraph_mode=None)).sizes == ()


@pytest.mark.parametrize(
    ("given", "rank", "name"),
    [("", 0, "{process}"), ("", 2, "{process}:dp2"), ("chat", 0, "chat"), ("x" * 128, 10, "x" * 123 + ":dp10")],
)
def test_ranks_of_data_parallelism_have_names_of_their_own(given, rank, name):
    assert engine_name(given, SimpleNamespace(data_parallel_index=rank)) == name.format(process=process_name())


def request_of(adapter):
    return SimpleNamespace(sampling_params=SimpleNamespace(), prompt_embeds=None, resumable=False, lora_request=adapter)


def test_an_adapter_is_identified_by_its_file_and_has_no_drafts_while_it_is_read(tmp_path, monkeypatch):
    file, may_read, warnings = tmp_path / "adapter_model.safetensors", Event(), []
    file.write_bytes(b"weights")
    monkeypatch.setattr(
        "drafter_service.plugins.vllm.engine.fingerprint", lambda path: may_read.wait(60) and fingerprint(path)
    )
    reader = OptionsReader(warnings.append)
    for path, wanted in ((str(tmp_path), fingerprint(file)), ("/nonexistent", "a:/nonexistent")):
        adapter = SimpleNamespace(lora_name="a", lora_path=path)
        request = request_of(adapter)
        assert may_read.is_set() or reader.options_of(request) is None
        may_read.set()
        assert eventually(lambda adapter=adapter: reader.fingerprint(adapter)) == wanted
    assert len(warnings) == 1
    assert reader.fingerprint(None) == ""


@pytest.mark.parametrize(
    ("function", "problem", "reason"),
    [
        ("pathlib.Path.is_dir", PermissionError(13, "Permission denied"), "{file}: Permission denied"),
        ("drafter_service.plugins.vllm.engine.fingerprint", RuntimeError("SECRET"), "{path} (RuntimeError)"),
    ],
)
def test_an_adapter_whose_file_cannot_be_examined_is_identified_by_its_name(
    tmp_path, monkeypatch, function, problem, reason
):
    monkeypatch.setattr(function, mock.Mock(side_effect=problem))
    warnings = []
    reader, adapter = OptionsReader(warnings.append), SimpleNamespace(lora_name="a", lora_path=str(tmp_path))
    assert eventually(lambda: reader.fingerprint(adapter)) == f"a:{tmp_path}"
    reason = reason.format(path=tmp_path, file=tmp_path / "adapter_model.safetensors")
    assert warnings == [f"cannot read {reason}; the adapter is identified by its name and path"]


def test_options_that_cannot_be_read_cost_drafts_and_are_reported_once(monkeypatch):
    warnings = []
    reader = OptionsReader(warnings.append)
    monkeypatch.setattr(reader, "_reader", mock.Mock(submit=mock.Mock(side_effect=RuntimeError("SECRET"))))
    request = request_of(SimpleNamespace(lora_name="a", lora_path="/a"))
    assert [reader.options_of(request) for _ in range(2)] == [None] * 2
    assert warnings == ["options of a request cannot be read (RuntimeError); it has no drafts"]


def test_classes_that_do_not_exist():
    with pytest.raises(AttributeError, match="no attribute 'Drafter'"):
        plugin.Drafter  # noqa: B018
