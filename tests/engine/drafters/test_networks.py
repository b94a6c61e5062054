"""Drafters with networks and random weights: outputs, and the logits that they draft from against naive twins."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from engine.drafters.medusa import MedusaDrafter
from engine.drafters.slots import SlotWriter
from engine.engine import build_engine
from engine.scheduling.request import Request, SamplingParams
from ssd.baselines.none import NoDrafter
from tests.engine.drafters.heads import HEADS
from tests.engine.drafters.networks import (
    CONFIG,
    TOLERANCE,
    Recorder,
    new_drafter,
    plain_outputs,
    requests,
    run,
    tokens_of,
)

KINDS = [*HEADS, "medusa"]
SHORTER = [kind for kind in KINDS if kind != "eagle"]
"""Without a kind that the drafter treats as `mtp`."""


@pytest.fixture(scope="module")
def plain(model):
    return plain_outputs(model)


def largest_difference(recorder, drafter, target):
    """Largest relative difference between some of the logits that a drafter drafted from and the naive twin's."""
    head = drafter.heads if isinstance(drafter, MedusaDrafter) else drafter.head
    return recorder.largest_difference(head, target)


@pytest.mark.parametrize(
    ("kind", "temperature", "shape"),
    [("mtp", 0.0, "tree"), *((kind, 0.8, "path") for kind in SHORTER), *((kind, 0.8, "tree") for kind in KINDS)],
)
def test_exact_outputs_equal_plain_decoding(model, plain, monkeypatch, kind, temperature, shape):
    recorder, config = Recorder(monkeypatch), replace(CONFIG, draft_shape=shape)
    drafter = new_drafter(kind, model, config)
    _, completions = run(model, config, requests(temperature), drafter)
    assert tokens_of(completions) == plain(temperature)
    assert sum(each.drafted for each in completions) > 100
    assert sum(each.accepted for each in completions) > 0 or temperature == 0 or kind == "medusa"
    assert any(each.cached_tokens for each in completions)
    if kind in HEADS:
        assert max(len(path) for _, path, _ in recorder.calls) == 3
    else:
        assert {depth for _, depth, _ in recorder.calls} == {0, 1, 2}
    assert largest_difference(recorder, drafter, model) < TOLERANCE


@pytest.mark.parametrize("kind", SHORTER)
def test_slots_and_states_survive_preemption(model, plain, monkeypatch, kind):
    """Preempted sequences find their own and others' pages in the prefix cache when they continue."""
    recorder, config = Recorder(monkeypatch), replace(CONFIG, watermark=0.0)
    drafter = new_drafter(kind, model, config)
    engine, completions = run(model, config, requests(0.8), drafter, pages=9)
    assert engine.scheduler.preemptions > 0
    assert tokens_of(completions) == plain(0.8)
    assert largest_difference(recorder, drafter, model) < TOLERANCE


def test_a_copy_of_the_target_drafts_after_sequences_ended_in_flight(model, plain):
    """Steps without drafts are launched before the host knows that a request has ended or is cancelled."""
    config = replace(CONFIG, in_flight=1)
    engine = build_engine(model, config, new_drafter("self", model, config))
    undrafted = [replace(each, max_draft=0) for each in requests(0.0, is_plain=True)]
    stopped = [replace(each, sampling=SamplingParams(24, stop_token_ids=tuple(range(0, 300, 5)))) for each in undrafted]
    assert sum(len(each.tokens) for each in engine.generate(stopped)) < 8 * 24
    engine.generate(
        undrafted, observe=lambda _: [engine.cancel(each.sequence_id) for each in engine.scheduler.running[:1]]
    )
    assert engine.drafter_failures.count == 0
    completions = engine.generate(requests(0.8))
    assert tokens_of(completions) == plain(0.8)
    assert sum(each.accepted for each in completions) > 0


@pytest.mark.parametrize(
    ("kind", "shape"), [("mtp", "path"), ("mtp", "tree"), ("draft-model", "path"), ("medusa", "path")]
)
def test_only_paths_are_verified_by_rejection(model, plain, monkeypatch, kind, shape):
    recorder, config = Recorder(monkeypatch), replace(CONFIG, draft_shape=shape, verification="rejection")
    drafter = new_drafter(kind, model, config)
    _, completions = run(model, config, requests(0.8), drafter)
    assert (tokens_of(completions) == plain(0.8)) == (shape == "tree")
    assert sum(each.accepted for each in completions) < sum(each.drafted for each in completions)
    assert sum(each.accepted for each in completions) > 0 or kind == "medusa"
    assert largest_difference(recorder, drafter, model) < TOLERANCE


@pytest.mark.parametrize("shape", ["path", "tree"])
def test_drafts_are_shorter_at_the_end_of_the_context_window(model, shape):
    window = model.config.max_positions
    rng = np.random.default_rng(4)
    submitted = [
        Request(rng.integers(1, 60, window - left).astype(np.uint32), SamplingParams(max_tokens=left, ignore_eos=True))
        for left in (1, 2, 3, 5, 9)
    ]
    config = replace(CONFIG, draft_shape=shape)
    plain = build_engine(model, config, NoDrafter()).generate(submitted)
    _, completions = run(model, config, submitted, new_drafter("self", model, config))
    assert tokens_of(completions) == tokens_of(plain)
    # A step with a draft of k tokens produces k + 1, so that nothing is drafted for the last token.
    assert [each.drafted > 0 for each in completions] == [False, False, True, True, True]


def test_slots_of_accepted_draft_tokens_are_not_computed_again(model, monkeypatch):
    """A draft model runs each committed token once if its drafts are accepted, except the last one of a draft."""
    ran, write = [], SlotWriter._write

    def counting(writer, spans):
        ran.append(sum(span.end - span.slots.filled for span in spans))
        return write(writer, spans)

    monkeypatch.setattr(SlotWriter, "_write", counting)
    head = HEADS["draft-model"](model)
    head.model, head.config, head.num_layers = model, model.config, model.config.num_layers
    submitted = [Request(np.arange(1, 9, dtype=np.uint32), SamplingParams(max_tokens=30, ignore_eos=True))]
    _, [completion] = run(model, CONFIG, submitted, new_drafter("draft-model", model, CONFIG, head=head))
    assert completion.accepted > 0.9 * completion.drafted > 10
    assert ran[0] == 9  # the prompt and the first token
    assert max(ran[1:]) == 2  # the last draft token, which was not run before, and the bonus token


def of_the_same_position(monkeypatch):
    """Planted fault: pair token t with the hidden state of t instead of t - 1."""
    keep = SlotWriter._keep_states

    def shifted(writer, sequences, computed, hidden, offsets):
        parts = [hidden[first:end].roll(-1, dims=0) for first, end in pairwise(offsets.tolist())]
        keep(writer, sequences, computed, torch.cat(parts), offsets)

    monkeypatch.setattr(SlotWriter, "_keep_states", shifted)


def without_page_states(monkeypatch):
    """Planted fault: after a prefix-cache hit, the preceding hidden state is missing."""
    restarted = SlotWriter._restarted

    def missing(writer, sequence, start):
        writer.states.zero_()
        return restarted(writer, sequence, start)

    monkeypatch.setattr(SlotWriter, "_restarted", missing)


def of_the_position_before(monkeypatch):
    """Planted fault: Medusa heads read the state of the position before."""
    observe = MedusaDrafter.observe

    def shifted(drafter, result):
        result.hidden = result.hidden.roll(1, dims=0)
        observe(drafter, result)

    monkeypatch.setattr(MedusaDrafter, "observe", shifted)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [("mtp", of_the_same_position), ("mtp", without_page_states), ("medusa", of_the_position_before)],
)
def test_planted_faults_are_caught(model, monkeypatch, kind, fault):
    recorder = Recorder(monkeypatch)
    fault(monkeypatch)
    drafter = new_drafter(kind, model, CONFIG)
    run(model, CONFIG, requests(0.8), drafter)
    assert largest_difference(recorder, drafter, model) > 10 * TOLERANCE
