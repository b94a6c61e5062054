"""Steps of fixed shapes on a twin of FlashInfer's FA2, with shorter contexts than planned."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.base import RaggedRows, StepShape
from engine.attention.calls import Chunks, KernelConfig, PagedCache, workspaces
from engine.attention.flashinfer import FlashInferFixed, requests_of
from engine.attention.plain import PlainFixed
from engine.models.config import ModelConfig
from ssd.errors import UserError
from tests.engine import flashinfer_fa2 as fa2
from tests.engine.flashinfer_twin import TWIN

PAGE_SIZE = 16


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """A device that splits short contexts."""
    monkeypatch.setattr(fa2, "LEAST_CHUNK", 2 * PAGE_SIZE)
    monkeypatch.setattr(fa2, "PROCESSORS", 20)


def compare(
    seed, *, heads=(4, 2), pages=14, library=TWIN, device="cpu", dtype=torch.float32, tolerance=2e-5, runs=None
):
    """Compare random steps of one shape with plain attention; contexts are up to 40 tokens shorter than planned.

    pages: number of pages of each sequence. runs: wraps the step, for example in a CUDA graph.
    """
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    sequences, width = int(rng.integers(1, 5)), 17
    step_shape = StepShape(sequences, sequences + int(rng.choice([0, 1, 4, 16 * sequences])), width, pages)
    count = step_shape.rows
    config = ModelConfig(
        9, 64, 8, num_layers=1, num_heads=heads[0], num_kv_heads=heads[1], head_dim=64, max_positions=99
    )
    cache = PagedCache(config, sequences * pages + 1, PAGE_SIZE, dtype, device)
    cache.layers.copy_(torch.randn(cache.layers.shape, generator=generator))
    settings = KernelConfig(*heads, 64, PAGE_SIZE, dtype, device)
    sizes = workspaces(*heads, 64, requests_of(step_shape, heads[0] // heads[1]), count)
    floats, integers = (torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes)
    tested = FlashInferFixed(library, settings, floats, integers, cache, step_shape)
    plain = PlainFixed(*(cache.layers[:, :, kind].float().contiguous() for kind in (0, 1)), step_shape)
    shapes = [(count, of_a_kind, 64) for of_a_kind in (heads[0], *2 * heads[1:])]
    new = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
    given = RaggedRows(
        torch.zeros(count, dtype=torch.int64, device=device),
        torch.zeros(sequences + 1, dtype=torch.int32, device=device),
        torch.zeros(sequences, dtype=torch.int32, device=device),
        torch.zeros(sequences, pages, dtype=torch.int32, device=device),
    )

    def step():
        return tested.begin(given)(0, *new)

    run = step if runs is None else runs(step)
    for _ in range(3):
        tables = rng.permutation(sequences * pages).reshape(sequences, pages)
        bounds = rng.integers(0, pages * PAGE_SIZE - width, sequences)
        contexts = np.maximum(bounds - rng.integers(0, 41, sequences), 0)
        spread = random_rows(rng, step_shape)
        starts = np.cumsum([0, *spread])
        places = np.concatenate([context + np.arange(own) for context, own in zip(contexts, spread, strict=True)])
        slots = tables.repeat(spread, axis=0)[np.arange(len(places)), places // PAGE_SIZE] * PAGE_SIZE
        unowned = np.full(count - len(places), sequences * pages * PAGE_SIZE)
        slots = np.concatenate((slots + places % PAGE_SIZE, unowned))
        for tensor, array in zip(given, (slots, starts, contexts, tables), strict=True):
            tensor.copy_(torch.from_numpy(array))
        for tensor in new:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        for attention in (tested, plain):
            attention.plan(bounds, np.array(spread))
        expected = plain.begin(given)(0, *(tensor.float() for tensor in new))
        attended = run().float()
        own = slice(starts[-1])
        torch.testing.assert_close(attended[own], expected[own], rtol=tolerance, atol=tolerance)
        assert torch.isfinite(attended).all()


def random_rows(rng, shape):
    """Number of rows of each sequence; the last sequences are idle and have none."""
    active = int(rng.integers(1, shape.sequences + 1))
    spread = np.ones(active, int)
    if shape.rows == shape.sequences:
        return [*spread.tolist(), *[0] * (shape.sequences - active)]
    for _ in range(int(rng.integers(0, shape.rows - active + 1))):
        one = rng.integers(active)
        spread[one] = min(shape.width, spread[one] + 1)
    return [*spread.tolist(), *[0] * (shape.sequences - active)]


@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_shorter_contexts_than_planned(seed, heads):
    compare(seed, heads=heads)


class Captured:
    """A step in a CUDA graph."""

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
def test_workspaces_are_large_enough(heads, sequences, tokens, longest):
    """Plans for any lengths fit on a device of an H200's size, and all have the same array offsets."""
    pages = np.random.default_rng(longest).integers(1, longest + 2, sequences)
    rng = np.random.default_rng(longest)
    shape = StepShape(sequences, sequences * tokens, tokens, 1)
    requests = requests_of(shape, heads[0] // heads[1])
    sizes = workspaces(*heads, requests, shape.rows)
    given = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
    layouts = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fa2, "PROCESSORS", 132)
        patch.setattr(fa2, "LEAST_CHUNK", 128)
        for counts in (pages, np.full(sequences, longest + 1), np.ones(sequences, int)):
            spread = random_rows(rng, shape)
            after = [shape.rows - sum(spread), *[0] * (requests - sequences - 1)]
            others = [-(-after[0] // PAGE_SIZE), *after[1:]]
            tables, queries = (
                torch.from_numpy(np.cumsum([0, *own, *more]).astype(np.int32))
                for own, more in ((counts, others), (spread, after))
            )
            sizes = (shape.rows, requests, heads[0], heads[1], PAGE_SIZE, True, heads[2], heads[2])
            rest = (True, -1, -1, False, 0, 0)
            layouts.add(tuple(fa2.plan(*given, given[1], queries, tables, tables, *sizes, *rest)))
    assert len(layouts) == 1


def test_short_drafts_run_on_small_tiles():
    """The tile size depends on the number of rows and of query heads per KV head."""
    for sequences, rows, tile in ((1, 1, 16), (1, 17, 64), (64, 64, 16), (64, 192, 16), (64, 320, 128), (2, 8, 16)):
        requests = requests_of(StepShape(sequences, rows, 17, 1), 4)
        assert requests > sequences
        assert fa2.cta_tile((rows - requests + 1) * 4, 128) == tile


def test_plans_of_an_unknown_format_are_refused():
    with pytest.raises(UserError, match=r"flashinfer-python 0\.7\.2"):
        Chunks(torch.zeros(64, dtype=torch.uint8), [0] * 16, 1, 1)
