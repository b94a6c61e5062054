"""Medusa heads with random weights through the engine."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.drafters.model_based.medusa import MedusaDrafter
from engine.engine import build_engine
from engine.models.layers import PLAIN
from engine.sampling.draft_sampler import DraftSampler
from engine.scheduling.pages import PagePool
from engine.scheduling.scheduler import Scheduler
from ssd.baselines.none import NoDrafter
from tests.engine.drafters.heads import make_head
from tests.engine.drafters.model_based.test_autoregressive import CONFIG, TOLERANCE, requests, tokens_of
from tests.engine.drafters.toy import attend_densely


class Recorder:
    """Records the logits from which draft tokens are sampled."""

    def __init__(self, monkeypatch):
        self.calls = []
        self._sample = DraftSampler.sample
        monkeypatch.setattr(DraftSampler, "sample", lambda sampler, *inputs: self.sample(sampler, *inputs))

    def sample(self, sampler, logits, owner, depth, *rest):
        for own, row in zip(owner.tolist(), logits, strict=True):
            self.calls.append((sampler._sequences[own].tokens.copy(), depth, row.clone()))
        return self._sample(sampler, logits, owner, depth, *rest)

    def largest_difference(self, heads, target):
        """Largest relative difference from heads on the target's states of the whole text."""
        differences = []
        for text, depth, row in self.calls[:: max(1, len(self.calls) // 60)]:
            tokens = torch.from_numpy(text.astype(np.int64))
            hidden, _ = target.hidden_states(tokens, torch.arange(len(tokens)), attend_densely, PLAIN)
            expected = heads(hidden[-2:-1])[0, depth]
            differences.append(float((expected - row).abs().max() / expected.abs().max()))
        return max(differences)


def run(model, config, temperature, pages=None):
    heads = make_head("medusa", model)
    submitted = requests(temperature)
    drafter = MedusaDrafter(heads, depth=5, has_trees=config.draft_shape == "tree", source=7)
    engine = build_engine(model, config, drafter)
    if pages is not None:
        engine.scheduler = Scheduler(config, PagePool(pages, config.page_size))
    return heads, engine, engine.generate(submitted)


@pytest.mark.parametrize("shape", ["path", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_exact_outputs_equal_plain_decoding(model, monkeypatch, temperature, shape):
    recorder = Recorder(monkeypatch)
    config = replace(CONFIG, draft_shape=shape)
    plain = build_engine(model, config, NoDrafter()).generate(requests(temperature))
    heads, _, completions = run(model, config, temperature)
    assert tokens_of(completions) == tokens_of(plain)
    assert sum(each.drafted for each in completions) > 200
    assert {depth for _, depth, _ in recorder.calls} == {0, 1, 2}
    assert recorder.largest_difference(heads, model) < TOLERANCE


def test_states_after_preemption(model, monkeypatch):
    recorder = Recorder(monkeypatch)
    config = replace(CONFIG, watermark=0.0)
    plain = build_engine(model, config, NoDrafter()).generate(requests(0.8))
    heads, engine, completions = run(model, config, 0.8, pages=9)
    assert engine.scheduler.preemptions > 0
    assert tokens_of(completions) == tokens_of(plain)
    assert recorder.largest_difference(heads, model) < TOLERANCE


@pytest.mark.parametrize("shape", ["path", "tree"])
def test_only_paths_are_verified_by_rejection(model, shape):
    config = replace(CONFIG, draft_shape=shape, verification="rejection")
    plain = build_engine(model, config, NoDrafter()).generate(requests(0.8))
    _, _, completions = run(model, config, 0.8)
    assert (tokens_of(completions) == tokens_of(plain)) == (shape == "tree")
    assert sum(each.drafted for each in completions) > 0


def test_a_state_of_another_position_is_caught(model, monkeypatch):
    """Planted fault: the heads read the state of the position before."""
    recorder = Recorder(monkeypatch)
    observe = MedusaDrafter.observe

    def shifted(drafter, result):
        result.hidden = result.hidden.roll(1, dims=0)
        observe(drafter, result)

    monkeypatch.setattr(MedusaDrafter, "observe", shifted)
    heads, _, _ = run(model, CONFIG, 0.8)
    assert recorder.largest_difference(heads, model) > 10 * TOLERANCE
