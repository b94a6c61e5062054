"""The benchmarks of a sidecar, with minimal amounts of work."""

import json
import sys

import pytest

from benchmarks import isolation, sidecar


@pytest.fixture
def document(monkeypatch, capsys):
    """Return a function that runs a command and returns its document."""

    def run(module, *arguments):
        monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
        module.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def test_steps_and_engines_of_a_sidecar_are_measured(document, monkeypatch):
    for name, value in {"BLOCKS": 2, "BLOCK_STEPS": 5, "ENGINE_COUNTS": (1, 2), "ENGINE_ROUNDS": 1}.items():
        monkeypatch.setattr(sidecar, name, value)
    # Processes of engines import the module anew.
    monkeypatch.setattr(sidecar, "run_engine", run_short)
    result = document(sidecar, "--corpus", "5000")
    assert result["ratio_engines1"] == 1
    assert result["drafts_per_s_engines2"] > 0
    assert result["drafted_per_sequence_batch64"] > 0


def run_short(address, seed):
    sidecar.ENGINE_STEPS = sidecar.WARM_UP_STEPS = 5
    return sidecar.run_engine(address, seed)


def test_drafts_have_no_text_of_another_namespace(document):
    result = document(isolation, "--tokens", "5000", "--probes", "20")
    assert result["control: share of contexts with a draft"] == 0.5
    assert {0 <= value["ordered"] <= 1 for value in result.values() if isinstance(value, dict)} == {True}
