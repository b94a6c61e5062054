"""The parts of the GPU benchmark that serve requests, on a CPU."""

from dataclasses import replace

import pytest

from benchmarks.gpu.bench import TINY, Bench
from benchmarks.gpu.stepping import FixedDrafter
from tests.benchmarks.gpu_parts import figures_of


def test_replay_accepts_drafts_of_recorded_traffic(bench):
    alone, together = figures_of(bench, "replay")
    for figure in (alone, together):
        assert figure.details["renumbered"]
        assert figure.details["none_tokens_per_step"] == 1
        assert figure.details["ssd_tokens_per_step"] > 1
    assert alone.target.value == 2.2
    assert together.details["requests"] == 3


@pytest.mark.parametrize("in_flight", [0, 1])
def test_rejected_drafts_are_never_accepted(bench, in_flight, monkeypatch):
    calls, draft = [], FixedDrafter.draft
    monkeypatch.setattr(FixedDrafter, "draft", lambda self, progress: calls.append(progress) or draft(self, progress))
    for figure in figures_of(Bench(replace(bench.setting, in_flight=in_flight)), "rejected"):
        assert figure.details["rejected_tokens_per_step"] == 1
        assert figure.target.value == 0.98
    assert any(progress.max_draft.any() for progress in calls)


def test_drafting_is_timed_embedded_and_remote(bench):
    embedded, remote = figures_of(bench, "drafting")
    assert ["ssd" in embedded.name, "ssd-remote" in remote.name] == [True, True]
    assert embedded.details["streams"] == TINY.served[-1] < TINY.streams
