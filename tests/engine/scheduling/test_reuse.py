"""Cached keys and values equal recomputed ones bitwise."""

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.drafters.registry import build_drafter
from engine.engine import build_engine
from engine.models.loader import load_model
from engine.models.packed import pack
from engine.scheduling.request import Request, SamplingParams
from ssd.config import DrafterConfig
from tests.engine.forward import cached_and_fresh

CONFIG = EngineConfig(max_sequences=6, max_step_tokens=160, max_draft=6, kv_memory_mib=1)


def requests():
    """Make 10 greedy requests whose prompts share starts of 0 to 60 tokens."""
    rng = np.random.default_rng(11)
    stem = rng.integers(1, 60, 60)
    return [
        Request(
            np.concatenate([stem[: rng.integers(0, 61)], rng.integers(1, 60, rng.integers(1, 20))]).astype(np.uint32),
            SamplingParams(max_tokens=int(rng.integers(20, 50)), temperature=0.0, seed=seed),
        )
        for seed in range(10)
    ]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of PyTorch has no oneDNN")
def test_cached_keys_and_values_equal_recomputed_ones_bitwise(model_folder):
    """Covers pages computed in chunks, token by token, with partly right drafts, and after other cached pages."""
    submitted = requests()
    packed = pack(load_model(model_folder))
    engine = build_engine(packed, CONFIG, build_drafter("ngram", DrafterConfig(), warn=pytest.fail))
    pool = engine.scheduler.pages
    pool.allocate(pool.count - 100)
    completions = [*engine.generate(submitted[:5]), *engine.generate(submitted[5:])]
    assert sum(completion.cached_tokens for completion in completions[1:5]) > 0
    pages = [
        page
        for request, completion in zip(submitted, completions, strict=True)
        for page in cached_and_fresh(packed, engine, np.concatenate([request.prompt, completion.tokens]))
    ]
    assert len(pages) > 30
    assert all(torch.equal(cached, fresh) for cached, fresh in pages)
