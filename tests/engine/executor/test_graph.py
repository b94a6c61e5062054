"""Steps of fixed shapes, and the shapes that steps are padded to."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.attention.base import StepShape
from engine.attention.flashinfer import FlashInferAttention, FusedOps
from engine.attention.plain import PlainAttention
from engine.executor.device_state import DeviceState, PaddedDrafts
from engine.executor.fixed_step import FixedStep, Kind
from engine.executor.kernels.inputs import build_inputs
from engine.executor.runner import Runner
from engine.executor.shapes import StepGrid, doubled
from engine.executor.transfer import CopyStream
from engine.models.config import ExpertsConfig, LatentConfig, ModelConfig
from engine.models.decoder import Decoder
from engine.models.layers import PLAIN
from engine.models.loader import load_model
from engine.scheduling.kernels import ROWS, SLOT
from engine.scheduling.request import SamplingParams
from tests.engine.conftest import VOCAB
from tests.engine.executor.kernels.conftest import on
from tests.engine.flashinfer_twin import TWIN
from tests.engine.forward import PAGE_SIZE, sequence_of
from tests.engine.steps import batch_of
from tests.engine.tables import install

PAGES, LONGEST, MAX_DRAFT = 40, 200, 6
GREEDY = Kind(samples=False, max_ranked=None)
CPU = torch.device("cpu")


def runner_of(model, backend, monkeypatch):
    """A runner whose cache has a padding page after the pages of sequences."""
    weights = model.embedding.weight
    settings = model.config, PAGES + 1, PAGE_SIZE, weights.dtype, str(weights.device)
    if backend == "plain":
        return Runner(model, PlainAttention(*settings), settings[-1], PLAIN)
    if weights.is_cuda:
        pytest.importorskip("flashinfer")
    else:
        monkeypatch.setattr("engine.attention.flashinfer.flashinfer", lambda: TWIN)
        monkeypatch.setattr("engine.attention.flashinfer.WORKSPACE_BYTES", 1)
    return Runner(model, FlashInferAttention(*settings), settings[-1], FusedOps())


@pytest.fixture(scope="module")
def wide(wide_folder):
    return load_model(wide_folder)


def decoding(rng, count, *, most_draft=MAX_DRAFT):
    """Sequences that are computed up to their last token, each with a draft and pages for it."""
    pages = iter(rng.permutation(PAGES).tolist())
    sequences = []
    for index in range(count):
        tokens = rng.integers(1, VOCAB, rng.integers(1, 70))
        draft = rng.integers(1, VOCAB, rng.integers(0, most_draft + 1))
        held = [next(pages) for _ in range(-(-(len(tokens) + len(draft)) // PAGE_SIZE))]
        sequences.append(sequence_of(tokens, held, computed=len(tokens) - 1, draft=draft, sequence_id=index))
        sequences[-1].sequence.max_length = LONGEST
    return sequences


def fill(runner, sequences):
    """Compute the keys and values that the sequences have in the cache."""
    for one in sequences:
        if one.computed:
            runner.forward(batch_of([sequence_of(one.sequence.tokens[:-1], one.sequence.pages)], PAGE_SIZE))


def state_of(sequences, *, slots=8, device=CPU):
    state = DeviceState(slots, LONGEST, LONGEST // PAGE_SIZE + 1, PAGES, device)
    for slot, entry in enumerate(sequences):
        install(state, slot, entry.sequence)
    return state


def fixed_logits(runner, state, sequences, batch, spare, slack):
    """Logits of tokens from a shape with `spare` padding rows per sequence, planned for contexts longer by `slack`."""
    drafted = MAX_DRAFT + spare
    widths = [*(1 + len(one.draft) + spare for one in sequences), *[0] * (batch - len(sequences))]
    shape = StepShape(batch, sum(widths) + 2 * spare, 1 + drafted, state.page_tables.shape[1])
    forward = runner.fixed(shape)
    padding = batch - len(sequences)
    bounds = [min(sequence.computed + slack, LONGEST - 1) for sequence in sequences]
    forward.plan(np.array([*bounds, *[0] * padding]), np.array(widths))
    device = state.lengths.device
    slots = torch.tensor([*range(len(sequences)), *[state.idle] * padding], device=device)
    tokens = np.full((batch, drafted), 7, np.int32)
    for row, sequence in zip(tokens, sequences, strict=False):
        row[: len(sequence.draft)] = sequence.draft
    lengths = torch.tensor([*(len(one.draft) for one in sequences), *[0] * padding], dtype=torch.int32, device=device)
    drafts = PaddedDrafts(torch.from_numpy(tokens).to(device), lengths)
    starts = torch.tensor(np.cumsum([0, *widths]), dtype=torch.int32, device=device)
    inputs = build_inputs(state, slots, drafts, starts, shape.rows, PAGE_SIZE)
    with torch.inference_mode():
        logits = forward(inputs, state.page_tables[slots])
    assert torch.isfinite(logits).all()
    return torch.cat([logits[starts[index] :][: 1 + len(one.draft)] for index, one in enumerate(sequences)])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("backend", ["plain", "flashinfer"])
@pytest.mark.parametrize("seed", range(6))
def test_padded_steps_give_the_logits_of_ragged_steps(wide_folder, backend, seed, device, monkeypatch):
    rng = np.random.default_rng(seed)
    is_rounded = (backend, device) == ("flashinfer", "cuda")
    model = load_model(wide_folder, dtype=torch.bfloat16 if is_rounded else torch.float32, device=device)
    runner = runner_of(model, backend, monkeypatch)
    sequences = decoding(rng, int(rng.integers(1, 6)))
    fill(runner, sequences)
    expected = runner.forward(batch_of(sequences, PAGE_SIZE))
    # The padded step overwrites what the ragged step wrote.
    state = state_of(sequences, device=torch.device(device))
    atol = 0.05 * expected.abs().max().item() if is_rounded else 2e-4
    for batch, spare, slack in ((len(sequences), 0, 0), (8, 3, 0), (8, 0, 40)):
        padded = fixed_logits(runner, state, sequences, batch, spare, slack)
        torch.testing.assert_close(padded, expected, atol=atol, rtol=1e-4)


EXPERTS = ExpertsConfig(8, 2, 32, (0, 1), shared_size=16, groups=4, groups_kept=2, has_correction=True)
DENSE = ModelConfig(300, 64, 96, 2, 4, 2, 16, 512)


KINDS = (GREEDY, Kind(True, None), Kind(True, 0), Kind(True, 32))


def step_of(config, dtype, device):
    """A step with rows of four sequences, and its state."""
    model = Decoder(config).to(dtype).to(device)
    attention = PlainAttention(model.config, PAGES + 1, PAGE_SIZE, dtype, device)
    shape = StepShape(4, 20, 1 + MAX_DRAFT, 13)
    forward = Runner(model, attention, device).fixed(shape)
    state = DeviceState(8, LONGEST, 13, PAGES, torch.device(device))
    state.lengths.fill_(10)
    state.limits.fill_(40)
    step = FixedStep(forward, state, shape, PAGE_SIZE, CopyStream(CPU))
    step._table[:, SLOT] = torch.arange(4, dtype=torch.int32, device=device)
    step._table[:, ROWS] = 5
    forward.plan(np.full(4, LONGEST - 1), np.full(4, 5))
    return step, state


@torch.inference_mode()
def run(step):
    for kind in KINDS:
        results, logits = step._step(kind._replace(host_rows=8))
        assert (results.shape, results.dtype, len(logits)) == ((4, 2 + 1 + MAX_DRAFT), torch.int32, 8)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (DENSE, torch.float32),
        (replace(DENSE, experts=EXPERTS), torch.bfloat16),
        (replace(DENSE, num_kv_heads=1, latent=LatentConfig(24, 32, 8, 12)), torch.float32),
    ],
)
def test_a_step_reads_no_values(config, dtype):
    """A step runs on tensors without values, so it can be captured."""
    run(step_of(config, dtype, "meta")[0])


@pytest.mark.gpu
def test_no_step_synchronizes_with_a_gpu():
    step, state = step_of(DENSE, torch.float32, on("cuda"))
    run(step)  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(step)
        state.add_pages(np.array([[0, 1, 2], [1, 2, 3]]))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_changes_the_state_in_place():
    """CUDA graphs hold the addresses of its tensors."""
    step, state = step_of(DENSE, torch.float32, "cpu")

    def addresses():
        return {name: each.data_ptr() for name, each in vars(state).items() if isinstance(each, torch.Tensor)}

    before = addresses()
    run(step)
    assert addresses() == before
    assert state.lengths[:4].gt(10).all()


def test_a_step_runs_in_the_smallest_shape_that_holds_it():
    made = []
    grid = StepGrid(lambda *shape: made.append(shape) or shape, None, 12, 10)
    drafts = ([0], [1, 0, 2], [10], [5] * 9, [4] * 8, [0, 3, 3], [10, *[0] * 11], [0, 1, 0])
    runs = [grid.step_for(len(most), len(most) + sum(most)) for most in drafts]
    assert runs == [(1, 1), (4, 8), (1, 11), (12, 60), (8, 40), (4, 12), (12, 24), (4, 8)]
    assert sorted(made) == sorted(set(runs))


def test_shapes_are_captured_largest_first(monkeypatch):
    captures, said = [], []

    def make(sequences, rows):
        step = type("Step", (), {})()
        step.capture = lambda kind, pool: captures.append((sequences, rows, kind.samples, pool))
        return step

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    grid = StepGrid(make, state_of([]), 2, 4)
    assert grid.captured == (0, 0.0)
    grid.capture(said.append)
    shapes = [(2, 10), (2, 6), (2, 2), (1, 5), (1, 1)]
    assert captures == [(*shape, samples, "pool") for shape in shapes for samples in (False, True)]
    assert grid.captured.graphs == 10
    assert said[0].startswith("capturing 10 CUDA graphs")
    assert said[1] == f"captured 10 CUDA graphs in {grid.captured.seconds:.1f} s"


def test_steps_have_few_kinds():
    grid = StepGrid(None, state_of([]), 2, 4)
    plain, drawn = SamplingParams(), SamplingParams(temperature=0.7)
    assert grid.kind_of([plain], VOCAB) == GREEDY
    assert grid.kind_of([plain, drawn], VOCAB) == Kind(True, None)
    assert grid.kind_of([drawn, replace(drawn, top_k=20)], VOCAB) == Kind(True, 32)
    assert grid.kind_of([replace(drawn, top_p=0.9)], VOCAB) == Kind(True, VOCAB)
    assert grid.kind_of([replace(drawn, min_p=0.1)], VOCAB) == Kind(True, 0)
    assert grid.kind_of([replace(plain, top_k=20)], VOCAB) == GREEDY


@pytest.mark.parametrize(
    ("first", "last", "sizes"),
    [(1, 1, [1]), (1, 8, [1, 2, 4, 8]), (4, 16, [4, 8, 16]), (4, 3, [3]), (1, 5, [1, 2, 4, 5])],
)
def test_doubling_sizes(first, last, sizes):
    assert doubled(first, last) == sizes
