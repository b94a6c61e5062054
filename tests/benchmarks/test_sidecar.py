"""The benchmarks of a sidecar, with minimal amounts of work."""

import json
import shutil
import sys

import pytest

from benchmarks import sidecar


@pytest.fixture
def document(monkeypatch, capsys):
    """Return a function that runs the command and returns its document."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
        sidecar.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def test_steps_and_engines_of_a_sidecar_are_measured(document, monkeypatch):
    for name, value in {"BLOCKS": 2, "BLOCK_STEPS": 5, "ENGINE_COUNTS": (2,), "ENGINE_ROUNDS": 1}.items():
        monkeypatch.setattr(sidecar, name, value)
    # Processes of engines import the module anew.
    monkeypatch.setattr(sidecar, "run_engine", run_short)
    result = document("--corpus", "5000", "--parts", "steps,engines")
    assert result["ratio_engines2"] == 1
    assert result["drafts_per_s_engines2"] > 0
    assert result["drafted_per_sequence_batch64"] > 0


def run_short(address, seed):
    sidecar.ENGINE_STEPS = sidecar.WARM_UP_STEPS = 5
    return sidecar.run_engine(address, seed)


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
def test_the_cost_and_the_delay_of_a_shared_log_are_measured(document, monkeypatch):
    for name, value in {"FEED_TOKENS_PER_S": 20_000, "FEED_S": 0.5, "PROBES": 3}.items():
        monkeypatch.setattr(sidecar, name, value)
    result = document("--corpus", "100000", "--parts", "log")
    # Redis sends each token to both sidecars.
    assert 4 < result["log_bytes_to_redis"] < result["log_bytes_from_redis"]
    assert 0 < result["log_delay_ms_p50"] <= result["log_delay_ms_p99"]
