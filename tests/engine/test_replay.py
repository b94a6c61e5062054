"""Recorded outputs, in every loop: what the target says counts only behind them."""

import numpy as np
import pytest
import torch

from engine.commands.options import LOOPS
from engine.config import EngineConfig
from engine.drafters.none import NoDrafter
from engine.executor.device_state import DeviceState
from engine.sampling import sampler
from engine.scheduling.request import Request, SamplingParams
from tests.engine.chain import VOCAB, answer, chain_engine
from tests.engine.workload import StrictDrafter, replayed

WAYS = [(loop, "path") for loop in LOOPS] + [("plain", "tree")]


def recorded_requests(count=8):
    """Records of half the output, of all of it, of more, and none."""
    rng = np.random.default_rng(2)
    lengths = (10, 20, 30, None)
    records = [None if size is None else rng.integers(1, VOCAB, size).astype(np.uint32) for size in lengths]
    return [
        Request(
            rng.integers(1, VOCAB, rng.integers(1, 12)).astype(np.uint32),
            SamplingParams(max_tokens=20),
            recorded=records[index % len(records)],
        )
        for index in range(count)
    ]


def replay(loop, shape="path", *, pages=100, drafts=True):
    """The requests run together; what came, and the engine."""
    config = EngineConfig(max_sequences=4, max_draft=5, max_step_tokens=64, loop=loop, draft_shape=shape)
    drafter = StrictDrafter(np.random.default_rng(0), shape, is_told_all=loop == "plain") if drafts else NoDrafter()
    engine = chain_engine(config, pages, drafter)
    asked = recorded_requests()
    for number, request in enumerate(asked):
        if drafts:
            drafter.expect(number, request.prompt, replayed(request))
    completions = engine.generate(asked, lambda _: engine.scheduler.check_integrity())
    return asked, completions, engine


def gives_the_record(asked, completions):
    return all(one.tokens.tolist() == replayed(request) for request, one in zip(asked, completions, strict=True))


@pytest.mark.parametrize(("loop", "shape"), WAYS)
@pytest.mark.parametrize("drafts", [False, True], ids=["alone", "drafts"])
def test_the_output_is_the_recorded_one_and_then_the_targets(loop, shape, drafts):
    asked, completions, engine = replay(loop, shape, drafts=drafts)
    assert gives_the_record(asked, completions)
    # The target would have said something else.
    assert all(replayed(one)[:10] != answer(one.prompt, 10) for one in asked if one.recorded is not None)
    assert engine.scheduler.preemptions == 0
    accepted = sum(completion.accepted for completion in completions)
    assert accepted > 40 if drafts else accepted == 0


@pytest.mark.parametrize(("loop", "shape"), WAYS)
def test_whoever_lost_its_pages_goes_on_in_its_record(loop, shape):
    asked, completions, engine = replay(loop, shape, pages=11)
    assert gives_the_record(asked, completions)
    assert engine.scheduler.preemptions > 2


def from_the_beginning(state, seat, sequence):
    """A fault: puts all of the record behind what was produced already."""
    sit(state, seat, sequence)
    if sequence.request.recorded is not None:
        record = torch.from_numpy(sequence.request.recorded[: sequence.room].astype(np.int32))
        state.history[seat, len(sequence) : len(sequence) + len(record)] = record


sit = DeviceState.sit


def test_planted_faults_are_caught(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(DeviceState, "sit", from_the_beginning)
        assert gives_the_record(*replay("pipelined", drafts=False)[:2])
        assert not gives_the_record(*replay("pipelined", pages=11, drafts=False)[:2])
    with monkeypatch.context() as patch:
        patch.setattr("engine.executor.graph.replayed", lambda state, inputs, tokens: tokens)
        assert not gives_the_record(*replay("pipelined", drafts=False)[:2])
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "_replay", lambda *_: None)
        assert not gives_the_record(*replay("plain", drafts=False)[:2])
        assert gives_the_record(*replay("pipelined", drafts=False)[:2])


def test_the_logits_are_sampled_all_the_same(monkeypatch):
    """What a replay takes is what the step would take."""
    seen = []
    for place in ("engine.sampling.sampler.greedy_tokens", "engine.executor.graph.sampled_tokens"):
        monkeypatch.setattr(place, counting(place, seen))
    for loop in LOOPS:
        seen.clear()
        _, completions, _ = replay(loop, drafts=False)
        assert len(seen) >= max(completion.steps for completion in completions)
        if loop == "pipelined":
            assert set(seen) == {"engine.executor.graph.sampled_tokens"}


def counting(place, seen):
    module, name = place.rsplit(".", 1)
    original = getattr(__import__(module, fromlist=[name]), name)

    def call(*given, **named):
        seen.append(place)
        return original(*given, **named)

    return call
