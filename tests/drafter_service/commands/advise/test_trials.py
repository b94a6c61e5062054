"""Trials have the same results in this process and in others."""

import itertools
import time

import pytest

from drafter_service.commands.advise import trials
from drafter_service.commands.advise.trials import TracedDrafter, Trial, curve_at, host_ms, run_trials
from ssd.budget.curve import StepCurve
from ssd.budget.roofline import roofline
from ssd.errors import UserError
from tests.drafter_service.commands.advise.logs import random_requests, repeated_requests, traffic_of

PROFILE = roofline("h100", "8b")
TRIALS = [Trial("ssd", "path", 8, 2, 20_000, is_whole=True), Trial("ngram", "path", 8, 2, 20_000)]


def test_processes_have_the_results_of_one(tmp_path, monkeypatch):
    traffic, path = traffic_of(repeated_requests()), tmp_path / "tokens"
    traffic.tokens.tofile(path)
    inline = run_trials(traffic, path, PROFILE, TRIALS, lambda _: None)
    monkeypatch.setattr(trials, "INLINE_TOKENS", 0)
    monkeypatch.setattr(trials, "usable_processors", lambda: {0, 1})
    spawned = run_trials(traffic, path, PROFILE, TRIALS, lambda _: None)
    for one, other in zip(inline, spawned, strict=True):
        assert one.trial == other.trial
        assert one.origins == other.origins
        assert one.replay.steps.tolist() == other.replay.steps.tolist()
        assert one.replay.order.tolist() == other.replay.order.tolist()


def test_a_process_that_the_system_ends_is_said(tmp_path, monkeypatch):
    traffic = traffic_of(repeated_requests())
    monkeypatch.setattr(trials, "INLINE_TOKENS", 0)
    monkeypatch.setattr(trials, "usable_processors", lambda: {0, 1})
    monkeypatch.setattr(trials, "_run", end_this_process)
    with pytest.raises(UserError, match="the system ended a replay"):
        run_trials(traffic, tmp_path / "tokens", PROFILE, TRIALS, lambda _: None)


def end_this_process(*_):
    import os

    os._exit(1)


@pytest.mark.parametrize("gpu", ["h100", "l4"])
@pytest.mark.parametrize("concurrency", [1, 4, 64])
def test_no_speedup_exceeds_its_tokens_per_step(gpu, concurrency, tmp_path):
    """A long output that repeats itself runs alone at the end, where its steps must not count as an empty engine's."""
    requests = [*random_requests(40, 20), ([1, 2], [*range(100, 150)] * 40)]
    trial = Trial("ssd", "path", 16, concurrency, 20_000)
    [outcome] = run_trials(traffic_of(requests), tmp_path / "tokens", roofline(gpu, "8b"), [trial], lambda _: None)
    assert 1 < outcome.speedup < outcome.replay.tokens_per_step


def test_a_step_with_drafts_includes_the_wait_for_the_host(tmp_path, monkeypatch):
    def speedup():
        return run_trials(traffic_of(repeated_requests()), tmp_path / "t", PROFILE, TRIALS[:1], lambda _: None)[
            0
        ].speedup

    waiting = speedup()
    monkeypatch.setattr(trials, "host_ms", lambda _: 0.0)
    assert speedup() > 1.1 * waiting


def test_a_partly_occupied_step_counts_as_its_share_of_a_full_one():
    full, shared = StepCurve.from_profile(PROFILE), curve_at(PROFILE, 64)
    for sequences in (1, 16, 64):
        expected = sequences / 64 * (full.seconds(4 * 64, 64) + host_ms(64) / 1e3)
        assert shared.seconds(4 * sequences, sequences) == pytest.approx(expected)


def test_drafts_are_timed_by_the_processor_time_of_the_thread(tmp_path, monkeypatch):
    assert TracedDrafter.clock is time.thread_time
    monkeypatch.setattr(TracedDrafter, "clock", staticmethod(itertools.count().__next__))
    [outcome] = run_trials(traffic_of(repeated_requests()), tmp_path / "tokens", PROFILE, TRIALS[:1], lambda _: None)
    assert outcome.speedup < 0.1, "each draft takes a second"
