"""Steps of fixed shapes on FlashInfer's FA2, tile by tile, where contexts are shorter than planned."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.cache import PagedCache
from engine.attention.calls import Shape
from engine.attention.chunks import Chunks, workspaces
from engine.attention.fixed import Grid
from engine.attention.flashinfer_fixed import FlashInferFixed
from engine.attention.plain_fixed import PlainFixed
from engine.models.config import ModelConfig
from ssd.errors import UserError
from tests.engine import flashinfer_fa2 as fa2
from tests.engine.flashinfer_twin import TWIN

PAGE_SIZE, PAGES, MOST_PAGES = 16, 60, 14


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """A device on which few keys are worth a split."""
    monkeypatch.setattr(fa2, "LEAST_CHUNK", 2 * PAGE_SIZE)
    monkeypatch.setattr(fa2, "PROCESSORS", 20)


def compare(seed, *, heads=(4, 2), library=TWIN):
    """Random steps, all of one shape; each context up to 40 tokens shorter than planned."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    sequences, tokens = int(rng.integers(1, 5)), int(rng.choice([1, 3, 5, 17]))
    config = ModelConfig(9, 64, 8, num_layers=1, num_heads=heads[0], num_kv_heads=heads[1], head_dim=64, max_positions=99)
    cache = PagedCache(config, PAGES + 1, PAGE_SIZE, torch.float32, "cpu")
    cache.layers.normal_(generator=generator)
    shape = Shape(*heads, 64, PAGE_SIZE, torch.float32, torch.float32, "cpu")
    floats, integers = (torch.zeros(size, dtype=torch.uint8) for size in workspaces(*heads, 64, sequences, tokens))
    tested = FlashInferFixed(library, shape, floats, integers, cache, sequences, tokens, MOST_PAGES)
    plain = PlainFixed(cache.layers[:, :, 0].contiguous(), cache.layers[:, :, 1].contiguous(), tokens)
    for _ in range(3):
        tables = rng.permutation(PAGES)[: sequences * MOST_PAGES].reshape(sequences, MOST_PAGES)
        bounds = rng.integers(0, MOST_PAGES * PAGE_SIZE - tokens, sequences)
        contexts = np.maximum(bounds - rng.integers(0, 41, sequences), 0)
        places = (contexts[:, None] + np.arange(tokens)).ravel()
        slots = tables.repeat(tokens, axis=0)[np.arange(len(places)), places // PAGE_SIZE] * PAGE_SIZE
        grid = Grid(
            torch.from_numpy(slots + places % PAGE_SIZE),
            torch.from_numpy(contexts.astype(np.int32)),
            torch.from_numpy(tables.astype(np.int32)),
        )
        new = [torch.randn(sequences * tokens, count, 64, generator=generator) for count in (heads[0], *2 * heads[1:])]
        answers = []
        for attention in (tested, plain):
            attention.plan(tables.tolist(), bounds.tolist())
            answers.append(attention.begin(grid)(0, *new))
        torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_shorter_contexts_than_planned(seed, heads):
    compare(seed, heads=heads)


def test_chunks_that_are_not_corrected_are_noticed(monkeypatch):
    monkeypatch.setattr(Chunks, "correct", lambda *_: None)
    with pytest.raises(AssertionError, match="not close"):
        for seed in range(6):
            compare(seed)


@given(
    st.sampled_from([(32, 8, 128), (32, 32, 128), (28, 4, 128), (8, 1, 256), (12, 2, 64)]),
    st.integers(1, 256),
    st.integers(1, 33),
    st.integers(0, 3000),
)
def test_workspaces_suffice(heads, sequences, tokens, longest):
    """On a device of the size of an H200, whatever the lengths; and no array moves from plan to plan."""
    pages = np.random.default_rng(longest).integers(1, longest + 2, sequences)
    given = [torch.empty(size, dtype=torch.uint8, device="meta") for size in workspaces(*heads, sequences, tokens)]
    layouts = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fa2, "PROCESSORS", 132)
        patch.setattr(fa2, "LEAST_CHUNK", 128)
        for counts in (pages, np.full(sequences, longest + 1), np.ones(sequences, int)):
            tables = torch.from_numpy(np.append(0, np.cumsum(counts)).astype(np.int32))
            queries = torch.arange(sequences + 1, dtype=torch.int32) * tokens
            sizes = (sequences * tokens, sequences, heads[0], heads[1], PAGE_SIZE, True, heads[2], heads[2])
            rest = (True, -1, -1, False, 0, tokens)
            layouts.add(tuple(fa2.plan(*given, given[1], queries, tables, tables, *sizes, *rest)))
    assert len(layouts) == 1


def test_unknown_plans_are_refused():
    with pytest.raises(UserError, match=r"flashinfer-python 0\.7\.2"):
        Chunks(torch.zeros(64, dtype=torch.uint8), [0] * 16, 1, 1)
