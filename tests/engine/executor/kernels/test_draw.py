"""Tokens drawn by the kernel and in parts, against the whole at once; and what memory drawing takes."""

import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from engine.executor.kernels import draw
from engine.sampling import noise as sampling
from engine.sampling import truncation
from engine.sampling.noise import greedy_tokens, gumbel_noise, sample_tokens
from engine.sampling.truncation import WORKSPACE_BYTES, Limits, Truncation, truncate
from engine.scheduling.request import GREEDY_BELOW
from tests.engine.executor.kernels.backends import planted

CASES = 40
INFINITE = float("inf")


def random_rows(seed, device="cpu"):
    """Logits of all sorts, and settings of rows: ties, and tokens that are forbidden; few rows or many."""
    rng = np.random.default_rng(seed)
    rows, vocab = int(rng.choice([1, 2, 7])), int(rng.choice([1, 15, 16, 70, 130]))
    logits = rng.normal(0, rng.choice([0.1, 3, 20]), (rows, vocab)).astype(np.float32)
    if rng.random() < 0.5:
        logits = np.round(logits)
    logits[rng.random((rows, vocab)) < rng.choice([0, 0.5, 1], p=[0.6, 0.3, 0.1])] = -INFINITE
    temperatures = rng.choice([0.0, GREEDY_BELOW, 0.3, 1.0, 5.0], rows)
    seeds, positions = (rng.integers(-(1 << 62), 1 << 62, rows) for _ in range(2))
    given = [logits, temperatures, seeds, positions]
    limits = None
    if seed % 2:
        top_k, top_p, min_p = (rng.choice(kinds, rows) for kinds in ([0, 1, 3], [1.0, 0.3], [0.0, 0.5]))
        limits = Truncation(top_k, top_p, min_p).on(torch.from_numpy(logits).to(device))
    return *(torch.from_numpy(array).to(device) for array in given), limits


def drawn_at_once(logits, temperatures, seeds, positions, limits):
    """What every row is to draw, with all scores and all noise laid out."""
    is_drawn = temperatures > GREEDY_BELOW
    scores = logits / torch.where(is_drawn, temperatures, 1).float()[:, None]
    if limits is not None:
        scores = truncate(scores, Truncation(*(column.cpu().numpy() for column in limits[:3])))
    scores += gumbel_noise(seeds, positions, logits.shape[1])
    return torch.where(is_drawn, greedy_tokens(scores), greedy_tokens(logits))


def agrees(draw_tokens, seed, device="cpu"):
    given = random_rows(seed, device)
    tokens = draw_tokens(*given)
    assert tokens.dtype == torch.int64
    return torch.equal(tokens, drawn_at_once(*given))


def test_parts_of_rows_draw_what_all_draw_together(monkeypatch):
    monkeypatch.setattr(truncation, "WORKSPACE_BYTES", 2 * 64 * 70)
    assert all(agrees(draw.draw_tokens, seed) for seed in range(CASES))


@pytest.mark.parametrize("vocab", [70, 20])
def test_parts_of_rows_choose_what_all_choose_together(vocab, monkeypatch):
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 3, (50, vocab)).astype(np.float32))
    temperatures = rng.choice([0.0, 0.7, 2.0], 50)
    settings = temperatures, rng.integers(0, 1 << 40, 50), rng.integers(0, 1000, 50)
    limits = Truncation(rng.choice([0, 4], 50), rng.choice([1.0, 0.6], 50), rng.choice([0.0, 0.2], 50))
    whole = [sample_tokens(logits, *settings, truncated) for truncated in (None, limits)]
    monkeypatch.setattr(truncation, "WORKSPACE_BYTES", 3 * 64 * 70)
    assert [sample_tokens(logits, *settings, truncated).tolist() for truncated in (None, limits)] == [
        tokens.tolist() for tokens in whole
    ]


class Memory(TorchDispatchMode):
    """Bytes of the tensors that operations make, as long as they live."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        owned = {tensor.untyped_storage()._cdata for tensor in tree_iter((args, kwargs)) if torch.is_tensor(tensor)}
        for tensor in tree_iter(result):
            if torch.is_tensor(tensor) and tensor.untyped_storage()._cdata not in owned:
                self.now += tensor.nbytes
                self.most = max(self.most, self.now)
                weakref.finalize(tensor, self._gone, tensor.nbytes)
        return result

    def _gone(self, size):
        self.now -= size


def memory_of(function, most):
    """Bytes that it takes beside the logits, of many rows; of tensors without values."""
    settings = {"device": "meta"}
    logits = torch.zeros(1088, 128_256, **settings)
    integers = torch.zeros(len(logits), dtype=torch.int64, **settings)
    numbers = torch.ones(len(logits), dtype=torch.float64, **settings)
    with Memory() as memory:
        function(logits, numbers, integers, Limits(integers, numbers, numbers, most))
    return memory.most


def drawn_without_limits(logits, temperatures, seeds, _):
    return sampling.sample_tokens_on_device(logits, temperatures, seeds, seeds)


def drawn_of_few(logits, temperatures, seeds, limits):
    return sampling.sample_tokens_on_device(logits, temperatures, seeds, seeds, limits)


def ranked(logits, temperatures, _, limits):
    return truncation.lowest_scores(logits, temperatures, limits)


@pytest.mark.parametrize(
    ("function", "most"), [(drawn_without_limits, 0), (drawn_of_few, 64), (ranked, 128_256)], ids=["all", "few", "rank"]
)
def test_memory_is_bounded(function, most, monkeypatch):
    assert WORKSPACE_BYTES / 4 < memory_of(function, most) < WORKSPACE_BYTES
    monkeypatch.setattr(truncation, "WORKSPACE_BYTES", WORKSPACE_BYTES << 10)
    assert memory_of(function, most) > 10 * WORKSPACE_BYTES


def kernel():
    pytest.importorskip("triton", reason="Triton is not installed")
    from engine.executor.kernels import draw_triton

    return draw_triton


@pytest.fixture
def interpreted(monkeypatch):
    """What makes a module ready: with several blocks a part, and several parts a row where there are few rows."""
    if torch.cuda.is_available():
        pytest.skip("the kernel runs on this machine's GPU; nothing is interpreted")

    def ready(module, programs=12):
        monkeypatch.setattr(module, "BLOCK", 16)
        monkeypatch.setattr(module, "PROGRAMS", programs)
        return module.draw_tokens

    return ready


@pytest.mark.parametrize("programs", [1, 12, 1000])
def test_the_kernel_draws_the_same(programs, interpreted):
    draw_tokens = interpreted(kernel(), programs)
    assert all(agrees(draw_tokens, seed) for seed in range(CASES))


def test_the_kernel_takes_rows_that_are_apart_and_none(interpreted):
    logits, *settings, _ = random_rows(2)
    assert logits.shape[1] > 1
    spaced = torch.nn.functional.pad(logits, (0, 5), value=99)[:, : logits.shape[1]]
    draw_tokens = interpreted(kernel())
    assert torch.equal(draw_tokens(spaced, *settings), drawn_at_once(logits, *settings, None))
    assert draw_tokens(*(column[:0] for column in (logits, *settings))).shape == (0,)


def test_the_kernel_takes_what_is_no_number_for_the_largest(interpreted):
    logits = torch.tensor([[0.0, 1, float("nan"), 5, float("nan")], [0.0, 9, 2, 3, 4]])
    for temperature in (0.0, 1.0):
        settings = torch.full((2,), temperature, dtype=torch.float64), torch.arange(2), torch.arange(2)
        assert interpreted(kernel())(logits, *settings).tolist() == drawn_at_once(logits, *settings, None).tolist()


@pytest.mark.parametrize("wrong", [False, True], ids=["as it is", "planted fault"])
def test_no_noise_is_above_its_bound(wrong, tmp_path):
    kernel()
    from tests.engine.executor.kernels import noise_kernel

    module = planted(noise_kernel, "gumbel_bound(own, column)", "0.99 * gumbel_bound(own, column)", tmp_path)
    fill_bounds = module.fill_bounds if wrong else noise_kernel.fill_bounds
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seeds = torch.arange(500, device=device)
    bounds = torch.empty(500, 1000, device=device)
    fill_bounds[(500,)](seeds, seeds, bounds, 1000, 1024)
    above = bounds - gumbel_noise(seeds, seeds, 1000)
    assert bool((above > 0).all()) != wrong
    assert above[bounds > 5].max() < 0.01


@pytest.mark.gpu
def test_the_kernel_on_a_gpu_draws_the_same():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    kernel()
    assert all(agrees(draw.draw_tokens, seed, "cuda") for seed in range(CASES))


@pytest.mark.gpu
def test_the_kernel_on_a_gpu_draws_from_a_large_vocabulary():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    kernel()
    torch.manual_seed(0)
    for rows in (1, 64, 1088):
        logits = torch.randn(rows, 128_256, device="cuda") * 3
        warmth = torch.rand(rows, dtype=torch.float64, device="cuda") + 0.2
        seeds, positions = (torch.randint(0, 1 << 40, (rows,), device="cuda") for _ in range(2))
        expected = sampling.sample_tokens_on_device(logits, warmth, seeds, positions)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        tokens = draw.draw_tokens(logits, warmth, seeds, positions)
        assert torch.equal(tokens, expected)
        assert torch.cuda.max_memory_allocated() - before < 1 << 20


FAULTS = {
    "no temperature": ("tl.div_rn(logit, warmth)", "logit"),
    "noise for greedy rows": ("temperature > tl.full([], GREEDY_BELOW, tl.float64)", "temperature > -1"),
    "a threshold in float32": ("tl.full([], GREEDY_BELOW, tl.float64)", "tl.full([], GREEDY_BELOW, tl.float32)"),
    "the highest of equals": (
        "tl.min(tl.where(score == highest, token, vocab)",
        "tl.max(tl.where(score == highest, token, -1)",
    ),
    "the last of equal parts": ("scores.argmax(dim=1, keepdim=True)", "parts - 1 - scores.flip(1).argmax(1, True)"),
    "the first block alone": ("bound, axis=0) > best", "bound, axis=0) > best and first == part * size"),
    "the first part alone": ("range(part * size, end, BLOCK)", "range(0, tl.minimum(size, vocab), BLOCK)"),
    "no bound of noise": ("bound = score + gumbel_bound(own, token)", "bound = score"),
    "noise of other tokens": ("score += gumbel(own, token)", "score += gumbel(own, token - first)"),
    "noise of another row": ("tl.load(positions + row)", "tl.load(positions)"),
    "no floor": ("score < tl.load(floors + row)", "score < -1e30"),
    "the floor itself is out": ("score < tl.load(floors + row)", "score <= tl.load(floors + row)"),
    "tokens behind the vocabulary": ('mask=token < end, other=float("-inf")', "mask=token < end, other=9.0"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_the_kernel_are_caught(fault, interpreted, tmp_path):
    draw_tokens = interpreted(planted(kernel(), *FAULTS[fault], tmp_path))
    assert not all(agrees(draw_tokens, seed) for seed in range(CASES))
