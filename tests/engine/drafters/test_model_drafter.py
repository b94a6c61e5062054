"""A model drafter through the engine: hidden states, its layer in the target's pages, q, both verifications."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.drafters.base import TargetInfo, TargetOutputs
from engine.drafters.drafts import Drafts
from engine.engine import build_engine
from engine.scheduling.pages import PagePool
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.scheduler import Scheduler
from ssd.baselines.none import NoDrafter
from ssd.config import DrafterConfig
from ssd.types import DraftBatch, Path
from tests.engine.drafters.toy import ToyDrafter, naive_logits
from tests.engine.steps import each_of

CONFIG = EngineConfig(max_sequences=4, max_step_tokens=48, max_draft=6, page_size=16, kv_memory_mib=1)


def requests(temperature):
    """Prompts with shared prefixes, some longer than a chunk, and settings that change the distribution."""
    rng = np.random.default_rng(2)
    stem = rng.integers(1, 60, 70)
    submitted = []
    for index in range(10):
        prompt = np.concatenate((stem[: 16 * rng.integers(0, 5)], rng.integers(1, 60, rng.integers(1, 40))))
        sampling = SamplingParams(
            max_tokens=24,
            temperature=temperature,
            seed=index,
            top_k=int(rng.choice([0, 8])),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            ignore_eos=True,
        )
        submitted.append(Request(prompt.astype(np.uint32), sampling))
    return submitted


def run(model, config, submitted, **how):
    drafter = ToyDrafter(DrafterConfig(), TargetInfo.from_model(model, config), **how)
    engine = build_engine(model, config, drafter)
    completions = engine.generate(submitted)
    engine.scheduler.check_integrity()
    return drafter, engine, completions


def largest_difference(drafter):
    """Largest difference between the logits of about 30 proposals and those of the naive twin."""
    differences = [0.0]
    for text, path, found in drafter.log[:: max(1, len(drafter.log) // 30)]:
        expected = torch.stack(naive_logits(drafter, text, path))
        differences.append(float((expected - torch.stack(found)).detach().abs().max()))
    return max(differences)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_exact_outputs_equal_plain_decoding(model, temperature, width):
    submitted = requests(temperature)
    config = replace(CONFIG, draft_shape="path" if width == 1 else "tree")
    plain = build_engine(model, config, NoDrafter()).generate(submitted)
    drafter, _, completions = run(model, config, submitted, width=width)
    assert [each.tokens.tolist() for each in completions] == [each.tokens.tolist() for each in plain]
    assert sum(each.drafted for each in completions) > 100
    assert sum(each.accepted for each in completions) > 0
    assert any(each.cached_tokens for each in completions)
    assert largest_difference(drafter) < 1e-3


def test_layers_in_the_pages_survive_preemption(model):
    """Preempted sequences find their own and others' pages in the prefix cache when they continue."""
    submitted = requests(0.8)
    config = replace(CONFIG, watermark=0.0)
    plain = build_engine(model, config, NoDrafter()).generate(submitted)
    target = TargetInfo.from_model(model, config)
    drafter = ToyDrafter(DrafterConfig(), target)
    engine = build_engine(model, config, drafter)
    pool = PagePool(9, config.page_size)
    engine.scheduler = Scheduler(config, pool)
    completions = engine.generate(submitted)
    assert engine.scheduler.preemptions > 0
    assert [each.tokens.tolist() for each in completions] == [each.tokens.tolist() for each in plain]
    assert largest_difference(drafter) < 1e-3


@pytest.mark.parametrize("width", [1, 2])
def test_drafts_are_verified_by_rejection(model, width):
    config = replace(CONFIG, draft_shape="path" if width == 1 else "tree", verification="rejection")
    drafter, _, completions = run(model, config, requests(0.8), width=width)
    plain = build_engine(model, config, NoDrafter()).generate(requests(0.8))
    assert [each.tokens.tolist() for each in completions] != [each.tokens.tolist() for each in plain]
    assert 0 < sum(each.accepted for each in completions) < sum(each.drafted for each in completions)
    assert largest_difference(drafter) < 1e-3


class Recycler:
    """Needs the largest logits, and drafts nothing."""

    needs = TargetOutputs(top_k=3)

    def __init__(self):
        self.seen = 0

    def start(self, sequence):
        pass

    def propose(self, plan):
        sizes = np.minimum(2, plan.rooms)
        paths = [Path(np.ones(size, np.uint32), np.ones(size, np.float32)) for size in sizes]
        return Drafts(DraftBatch.from_paths(paths))

    def observe(self, result):
        assert len(result.top_tokens) == result.plan.producers + result.plan.verified
        for each in each_of(result):
            assert each.top_tokens.shape == each.top_logits.shape == (1 + each.drafted, 3)
            own = int(each.tokens[each.accepted]) if len(each.tokens) > each.accepted else None
            rows = np.append(0, 1 + each.kept)
            assert own in (None, int(each.top_tokens[rows[-1], 0]))
            self.seen += 1 + each.drafted

    def finish(self, sequence, learn):
        pass

    def close(self):
        pass


def test_largest_logits_of_verified_rows(model):
    drafter = Recycler()
    submitted = [replace(request, sampling=SamplingParams(max_tokens=8)) for request in requests(0.0)]
    build_engine(model, CONFIG, drafter).generate(submitted)
    assert drafter.seen > 100
