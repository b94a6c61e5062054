"""Cached keys and values equal recomputed ones bitwise, and the prefix cache does not change outputs."""

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.drafters.registry import build_drafter
from engine.engine import build_engine
from engine.models.loader import load_model
from engine.models.packed import pack
from engine.scheduling.request import Request, SamplingParams
from ssd.baselines.none import NoDrafter
from ssd.config import DrafterConfig
from tests.engine.forward import cached_and_fresh

CONFIG = EngineConfig(max_sequences=6, max_step_tokens=160, max_draft=6, kv_memory_mib=1)
PAGES = 14


@pytest.fixture(scope="module")
def packed(model_folder):
    return pack(load_model(model_folder))


def requests(temperature):
    rng = np.random.default_rng(11)
    stem = rng.integers(1, 60, 60)
    return [
        Request(
            np.concatenate([stem[: rng.integers(0, 61)], rng.integers(1, 60, rng.integers(1, 20))]).astype(np.uint32),
            SamplingParams(max_tokens=int(rng.integers(20, 50)), temperature=temperature, seed=seed),
        )
        for seed in range(10)
    ]


def engine_on(model, *, prefix_cache, pages=PAGES):
    """An engine with an n-gram drafter and `pages` pages."""
    config = EngineConfig(**{**vars(CONFIG), "prefix_cache": prefix_cache})
    engine = build_engine(model, config, build_drafter("ngram", DrafterConfig(), warn=pytest.fail))
    pool = engine.scheduler.pages
    pool.allocate(pool.count - pages)
    return engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_prefix_cache_does_not_change_outputs_when_pages_are_scarce(packed, temperature):
    submitted = requests(temperature)
    alone = build_engine(packed, EngineConfig(max_sequences=1, max_draft=0, prefix_cache=False), NoDrafter())
    expected = [alone.generate([request])[0].tokens.tolist() for request in submitted]
    for prefix_cache in (False, True):
        engine = engine_on(packed, prefix_cache=prefix_cache)
        completions = engine.generate(submitted)
        assert [completion.tokens.tolist() for completion in completions] == expected
        assert engine.scheduler.preemptions
        assert bool(sum(completion.cached_tokens for completion in completions)) == prefix_cache
        assert engine.scheduler.pages.free_count == PAGES


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of PyTorch has no oneDNN")
def test_cached_keys_and_values_equal_recomputed_ones_bitwise(packed):
    """Covers pages computed in chunks, token by token, with partly right drafts, and after other cached pages."""
    submitted = requests(0.0)
    engine = engine_on(packed, prefix_cache=True, pages=100)
    completions = [*engine.generate(submitted[:5]), *engine.generate(submitted[5:])]
    assert sum(completion.cached_tokens for completion in completions[1:5]) > 0
    pages = [
        page
        for request, completion in zip(submitted, completions, strict=True)
        for page in cached_and_fresh(packed, engine, np.concatenate([request.prompt, completion.tokens]))
    ]
    assert len(pages) > 30
    assert all(torch.equal(cached, fresh) for cached, fresh in pages)
