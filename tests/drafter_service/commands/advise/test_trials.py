"""Durations that trials count (of steps, of drafting, of the host, of prompts), and where accepted drafts came from."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.commands.advise import trials
from drafter_service.commands.advise.trials import (
    EVERY,
    PAGE_SIZE,
    Tracer,
    Trial,
    curve_at,
    host_ms,
    run_trial,
    uncached_prompt_tokens,
)
from ssd import Corpus
from ssd.budget.roofline import roofline
from ssd.replay import Step
from ssd.types import DraftBatch, Path, Source
from tests.drafter_service.commands.advise.logs import random_requests, repeated_requests
from tests.replay import recording_of
from tests.strategies import array

PROFILE = roofline("h100", "8b")
TRIAL = Trial("ssd", "path", 8, 2, 20_000)
OUTPUT = list(range(20, 40))


def speedup(recording, profile, trial):
    return run_trial(recording, profile, trial, lambda _: None).speedup


@pytest.mark.parametrize("gpu", ["h100", "l4"])
@pytest.mark.parametrize("concurrency", [1, 4, 64])
def test_no_speedup_exceeds_its_tokens_per_step(gpu, concurrency):
    """A long output that repeats itself runs alone at the end, where its steps must not count as an empty engine's."""
    requests = [*random_requests(40, 20), ([1, 2], [*range(100, 150)] * 40)]
    trial = Trial("ssd", "path", 16, concurrency, 20_000)
    outcome = run_trial(recording_of(requests), roofline(gpu, "8b"), trial, lambda _: None)
    assert 1 < outcome.speedup < outcome.counts.tokens_per_step


def test_a_step_with_drafts_includes_the_wait_for_the_host(monkeypatch):
    recording = recording_of(repeated_requests())
    waiting = speedup(recording, PROFILE, TRIAL)
    monkeypatch.setattr(trials, "host_ms", lambda _: 0.0)
    assert speedup(recording, PROFILE, TRIAL) > 1.1 * waiting


def test_a_partly_occupied_step_counts_as_its_share_of_a_full_one():
    full, shared = PROFILE.curve(), curve_at(PROFILE, 64)
    for sequences in (1, 16, 64):
        expected = sequences / 64 * (full.seconds(4 * 64, 64) + host_ms(64) / 1e3)
        assert shared.seconds(4 * sequences, sequences) == pytest.approx(expected)


def test_drafts_are_timed_by_the_processor_time_of_the_thread(monkeypatch):
    monkeypatch.setattr(time, "thread_time", itertools.count().__next__)
    assert speedup(recording_of(repeated_requests()), PROFILE, TRIAL) < 0.1, "each draft takes a second"


@st.composite
def texts(draw):
    """Return token ids in pages of one token, so that texts share pages often, and a part of a page."""
    pages = draw(st.lists(st.integers(0, 1), max_size=4))
    return [token for token in pages for _ in range(PAGE_SIZE)] + [7] * draw(st.integers(0, 3))


def slow_uncached(requests):
    missing = 0
    for number, (prompt, output) in enumerate(requests):
        own = prompt + output
        shared = 0
        for earlier in (a + b for a, b in requests[:number]):
            same = next((at for at, (x, y) in enumerate(zip(own, earlier, strict=False)) if x != y), None)
            same = min(len(own), len(earlier)) if same is None else same
            shared = max(shared, same // PAGE_SIZE * PAGE_SIZE)
        missing += max(0, len(prompt) - shared)
    return missing


@given(st.lists(st.tuples(texts(), texts()), max_size=6), st.booleans())
def test_uncached_prompt_tokens_equal_the_slow_twin(requests, has_times):
    columns = {"began_s": range(len(requests), 0, -1)} if has_times else {}
    in_order = requests[::-1] if has_times else requests
    assert uncached_prompt_tokens(recording_of(requests, **columns)) == slow_uncached(in_order)


def test_drafts_from_running_requests_are_left_out():
    recording = recording_of([([1], OUTPUT)] * 2)
    corpus = Corpus(20_000)
    tracer = Tracer(recording, corpus)

    def observe(request, draft, source=Source.CORPUS):
        """Record a step that accepts a draft."""
        step = Step(recording, np.zeros((4, 2), np.int64), max_draft=len(draft))
        step.add(request)
        step.verify(DraftBatch.from_paths([Path(array(draft), np.ones(len(draft), np.float32), source)]))
        tracer.observe(step)

    def trace(source):
        """Record as many steps of the second request as are needed for one draft to be traced."""
        for _ in range(EVERY):
            observe(1, OUTPUT[:4], source)

    trace(Source.CORPUS)
    assert tracer.origins == []
    trace(Source.LOCAL)
    assert [origin.source for origin in tracer.origins] == [-1]
    observe(0, OUTPUT)
    tracer.remember(array([1, *OUTPUT]), None, 0)
    corpus.refresh()
    assert tracer._ends == [corpus.indexed]
    trace(Source.CORPUS)
    assert [(origin.source, origin.accepted) for origin in tracer.origins] == [(-1, 4), (0, 4)]
