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

PAGE_SIZE = 16


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """A device on which few keys are worth a split."""
    monkeypatch.setattr(fa2, "LEAST_CHUNK", 2 * PAGE_SIZE)
    monkeypatch.setattr(fa2, "PROCESSORS", 20)


def compare(
    seed, *, heads=(4, 2), pages=14, library=TWIN, device="cpu", dtype=torch.float32, tolerance=2e-5, runs=None
):
    """Random steps, all of one shape; each context up to 40 tokens shorter than planned.

    pages: of each sequence. runs: from a step to something that does the same.
    """
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    sequences, tokens = int(rng.integers(1, 5)), int(rng.choice([1, 3, 5, 17]))
    config = ModelConfig(
        9, 64, 8, num_layers=1, num_heads=heads[0], num_kv_heads=heads[1], head_dim=64, max_positions=99
    )
    cache = PagedCache(config, sequences * pages + 1, PAGE_SIZE, dtype, device)
    cache.layers.copy_(torch.randn(cache.layers.shape, generator=generator))
    shape = Shape(*heads, 64, PAGE_SIZE, dtype, dtype, device)
    floats, integers = (
        torch.zeros(size, dtype=torch.uint8, device=device) for size in workspaces(*heads, 64, sequences, tokens)
    )
    tested = FlashInferFixed(library, shape, floats, integers, cache, sequences, tokens, pages)
    plain = PlainFixed(*(cache.layers[:, :, kind].float().contiguous() for kind in (0, 1)), tokens)
    shapes = [(sequences * tokens, count, 64) for count in (heads[0], *2 * heads[1:])]
    new = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
    grid = Grid(
        torch.zeros(sequences * tokens, dtype=torch.int64, device=device),
        torch.zeros(sequences, dtype=torch.int32, device=device),
        torch.zeros(sequences, pages, dtype=torch.int32, device=device),
    )

    def step():
        return tested.begin(grid)(0, *new)

    run = step if runs is None else runs(step)
    for _ in range(3):
        tables = rng.permutation(sequences * pages).reshape(sequences, pages)
        bounds = rng.integers(0, pages * PAGE_SIZE - tokens, sequences)
        contexts = np.maximum(bounds - rng.integers(0, 41, sequences), 0)
        places = (contexts[:, None] + np.arange(tokens)).ravel()
        slots = tables.repeat(tokens, axis=0)[np.arange(len(places)), places // PAGE_SIZE] * PAGE_SIZE
        for tensor, array in zip(grid, (slots + places % PAGE_SIZE, contexts, tables), strict=True):
            tensor.copy_(torch.from_numpy(array))
        for tensor in new:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        for attention in (tested, plain):
            attention.plan(tables.tolist(), bounds.tolist())
        expected = plain.begin(grid)(0, *(tensor.float() for tensor in new))
        torch.testing.assert_close(run().float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_shorter_contexts_than_planned(seed, heads):
    compare(seed, heads=heads)


def test_chunks_that_are_not_corrected_are_noticed(monkeypatch):
    monkeypatch.setattr(Chunks, "correct", lambda *_: None)
    with pytest.raises(AssertionError, match="not close"):
        compare(0)


class Captured:
    """A step as a CUDA graph."""

    def __init__(self, step):
        self.step, self.graph = step, None

    def __call__(self):
        if self.graph is None:
            self.step()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.answer = self.step()
        self.graph.replay()
        return self.answer


@pytest.mark.gpu
@pytest.mark.parametrize("runs", [None, Captured], ids=["launched", "captured"])
@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (8, 2)], ids=str)
def test_shorter_contexts_than_planned_on_a_gpu(heads, runs):
    library = pytest.importorskip("flashinfer")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for seed in range(10):
        compare(
            seed, heads=heads, pages=60, library=library, device="cuda", dtype=torch.bfloat16, tolerance=2e-2, runs=runs
        )


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
