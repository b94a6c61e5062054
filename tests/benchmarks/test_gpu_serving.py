"""Requests of recorded traffic, and serving them."""

from contextlib import closing

import numpy as np
import pytest
import torch

from benchmarks.gpu.requests import Limits, replay_items
from benchmarks.gpu.serving import Run, serve
from benchmarks.gpu.shapes import SHAPES, random_model
from engine.config import EngineConfig
from engine.drafters.registry import build_drafter
from engine.engine import build_engine
from engine.scheduling.times import StageTimes
from ssd.config import DrafterConfig
from ssd.errors import UserError
from ssd.replay import RecordedRequest, Recording
from tests.replay import recording_of

TINY = SHAPES["tiny"]


@pytest.fixture
def trace():
    """Return a trace of 6 requests of 2 sessions that repeat one phrase, with token ids above small vocabularies."""
    phrase = np.random.default_rng(0).integers(150_000, 200_000, 7).astype(np.uint32)
    text = np.tile(phrase, 6)
    return Recording.of([RecordedRequest(text[:20], text[20:], number % 2) for number in range(6)])


@pytest.fixture
def items(trace):
    return replay_items(trace, 6, Limits(prompt_tokens=18, max_tokens=15), TINY)


def test_a_replay_gives_the_recorded_output_with_every_drafter(items):
    model = random_model(TINY, torch.float32)
    for drafter in ("none", "ngram", "ssd"):
        for concurrency in (1, 2):
            drafts = build_drafter(drafter, DrafterConfig(max_draft=33), warn=print)
            config = EngineConfig(max_sequences=concurrency)
            with closing(build_engine(model, config, drafts)) as engine:
                run = serve(engine, items, concurrency)
            assert [output.tolist() for output in run.outputs] == [item.request.recorded.tolist() for item in items]
            # The prompt already contains the phrase.
            assert (run.tokens / run.deliveries > 2) == (drafter != "none") == (run.drafted > 0)


def test_tokens_are_renumbered_only_for_models_with_fewer_of_them(trace, items):
    large = replay_items(trace, 6, Limits(prompt_tokens=18, max_tokens=15), SHAPES["llama3-8b"])
    assert max(int(item.request.prompt.max()) for item in items + large) < 7
    ids = trace.tokens[2:35]
    dense = np.concatenate([items[0].request.prompt, items[0].request.recorded])
    assert (np.equal.outer(ids, ids) == np.equal.outer(dense, dense)).all()
    few = recording_of([(range(9, 29), range(29, 49))])
    [same] = replay_items(few, 1, Limits(18, 15), TINY)
    assert same.request.prompt.tolist() == list(range(11, 29))
    assert same.request.recorded.tolist() == list(range(29, 44))
    many = recording_of([(range(4_000), range(4_000, 5_000))])
    with pytest.raises(UserError, match=r"have 5,000 distinct tokens, the model has 4,096"):
        replay_items(many, 1, Limits(4_000, 1_000), TINY)


def test_requests_of_a_session_run_one_after_the_other(items):
    model, drafter = random_model(TINY, torch.float32), build_drafter("none", DrafterConfig(), warn=print)
    run = serve(build_engine(model, EngineConfig(max_sequences=6), drafter), items, 6)
    assert max(sequences for _, sequences in run.steps) == 2


def test_figures_of_steps():
    full, half, idle = StageTimes(schedule=0.25, forward=1.0), StageTimes(schedule=9.0, forward=1.0), StageTimes(1.0)
    run = Run([np.arange(8)], seconds=2.0, steps=[(full, 2), (full, 2), (half, 1), (idle, 0)])
    assert (run.rate, run.overhead(2), run.overhead(4)) == (4.0, 0.25, pytest.approx(0.625))
    assert run.share("forward") == pytest.approx(3 / 13.5)
