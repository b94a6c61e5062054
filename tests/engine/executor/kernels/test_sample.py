"""Compare tokens sampled on the device with those of one unsplit computation."""

import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from engine.executor.kernels import sample as sample_module
from engine.executor.kernels.sample import sample_tokens
from engine.sampling import noise
from engine.sampling.noise import (
    WORKSPACE_BYTES,
    Limits,
    greedy_tokens,
    gumbel_noise,
    truncate,
)
from engine.scheduling.request import GREEDY_BELOW
from tests.engine.executor.kernels.conftest import INTERPRETED, on, require_interpreter

CASES = 40
INFINITE = float("inf")


def random_rows(seed, device="cpu", vocabularies=(1, 15, 16, 40, 70)):
    """Logits with ties and forbidden tokens, and settings of each row."""
    rng = np.random.default_rng(seed)
    rows, vocab = int(rng.choice([1, 2, 5])), int(rng.choice(vocabularies))
    logits = rng.normal(0, rng.choice([0.1, 3, 30]), (rows, vocab)).astype(np.float32)
    if rng.random() < 0.5:
        logits = np.round(logits)
    logits[rng.random((rows, vocab)) < rng.choice([0, 0.5, 1], p=[0.6, 0.3, 0.1])] = -INFINITE
    temperatures = rng.choice([0.0, GREEDY_BELOW, 0.3, 1.0, 5.0], rows)
    seeds, positions = (rng.integers(-(1 << 62), 1 << 62, rows) for _ in range(2))
    given = [logits, temperatures, seeds, positions]
    limits = None
    if seed % 2:
        kinds = [-1, 0, 1, 3, 1000], [1.0, 0.9, 0.3, 1e-9], [0.0, 0.05, 0.5, 1.0]
        top_k, top_p, min_p = (rng.choice(each, rows) for each in kinds)
        limits = Limits(*(torch.from_numpy(each).to(device) for each in (top_k, top_p, min_p)), vocab)
    return *(torch.from_numpy(array).to(device) for array in given), limits


def sampled_in_one_part(logits, temperatures, seeds, positions, limits):
    """Naive twin: the token of every row, from all scores and all noise at once."""
    is_sampled = temperatures > GREEDY_BELOW
    scores = logits / torch.where(is_sampled, temperatures, 1).float()[:, None]
    if limits is not None:
        scores = truncate(scores, limits)
    scores += gumbel_noise(seeds, positions, logits.shape[1])
    return torch.where(is_sampled, greedy_tokens(scores), greedy_tokens(logits))


def agrees(implementation, seed, *sizes):
    given = random_rows(seed, *sizes)
    tokens = implementation(*given)
    assert tokens.dtype == torch.int64
    return torch.equal(tokens, sampled_in_one_part(*given))


def test_rows_sampled_in_parts_give_the_same_tokens(monkeypatch):
    """Also those of the kernel for CPUs, which computes only the noise that may matter."""
    assert all(agrees(sample_tokens.torch, seed, "cpu", (1, 3, 50, 600)) for seed in range(5 * CASES))
    monkeypatch.setattr(noise, "WORKSPACE_BYTES", 2 * 64 * 70)
    assert all(agrees(noise.sample_tokens_on_device, seed) for seed in range(CASES))


class Memory(TorchDispatchMode):
    """Counts the bytes of tensors from their creation until they are freed."""

    def __init__(self):
        super().__init__()
        self.current = self.peak = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        owned = {tensor.untyped_storage()._cdata for tensor in tree_iter((args, kwargs)) if torch.is_tensor(tensor)}
        for tensor in tree_iter(result):
            if torch.is_tensor(tensor) and tensor.untyped_storage()._cdata not in owned:
                self.current += tensor.nbytes
                self.peak = max(self.peak, self.current)
                weakref.finalize(tensor, self._gone, tensor.nbytes)
        return result

    def _gone(self, size):
        self.current -= size


def memory_of(function, most):
    """Peak number of bytes in use besides the logits, for many rows of tensors without values."""
    settings = {"device": "meta"}
    logits = torch.zeros(1088, 128_256, **settings)
    integers = torch.zeros(len(logits), dtype=torch.int64, **settings)
    numbers = torch.ones(len(logits), dtype=torch.float64, **settings)
    with Memory() as memory:
        function(logits, numbers, integers, Limits(integers, numbers, numbers, most))
    return memory.peak


def sample(logits, temperatures, seeds, limits):
    return noise.sample_tokens_on_device(logits, temperatures, seeds, seeds, limits if limits.max_ranked else None)


def rank(logits, temperatures, _, limits):
    return noise.lowest_scores(logits, temperatures, limits)


@pytest.mark.parametrize(("function", "most"), [(sample, 0), (sample, 64), (rank, 128_256)])
def test_memory_is_bounded(function, most, monkeypatch):
    assert WORKSPACE_BYTES / 4 < memory_of(function, most) < WORKSPACE_BYTES
    monkeypatch.setattr(noise, "WORKSPACE_BYTES", WORKSPACE_BYTES << 10)
    assert memory_of(function, most) > 10 * WORKSPACE_BYTES


@pytest.fixture
def small_blocks(monkeypatch):
    """Return the kernel with several blocks per part, and several parts per row."""
    require_interpreter()

    def kernel(programs=12):
        monkeypatch.setattr(sample_module, "BLOCK", 16)
        monkeypatch.setattr(sample_module, "PROGRAMS", programs)
        return INTERPRETED.of(sample_tokens)

    return kernel


@pytest.mark.parametrize("programs", [1, 12, 1000])
def test_the_kernel_equals_the_reference(programs, small_blocks):
    kernel = small_blocks(programs)
    assert all(agrees(kernel, seed) for seed in range(12))


def test_the_kernel_accepts_strided_rows_and_no_rows(small_blocks):
    logits, *row_settings, _ = random_rows(2)
    assert logits.shape[1] > 1
    spaced = torch.nn.functional.pad(logits, (0, 5), value=99)[:, : logits.shape[1]]
    kernel = small_blocks()
    assert torch.equal(kernel(spaced, *row_settings), sampled_in_one_part(logits, *row_settings, None))
    assert kernel(*(column[:0] for column in (logits, *row_settings))).shape == (0,)


def test_the_kernel_treats_nan_as_the_largest_score(small_blocks):
    logits = torch.tensor([[0.0, 1, float("nan"), 5, float("nan")], [0.0, 9, 2, 3, 4]])
    for temperature in (0.0, 1.0):
        row_settings = torch.full((2,), temperature, dtype=torch.float64), torch.arange(2), torch.arange(2)
        expected = sampled_in_one_part(logits, *row_settings, None)
        assert small_blocks()(logits, *row_settings).tolist() == expected.tolist()


@pytest.mark.gpu
def test_the_kernel_on_a_gpu_equals_the_reference():
    pytest.importorskip("triton", reason="needs Triton")
    assert all(agrees(sample_tokens, seed, on("cuda")) for seed in range(CASES))


@pytest.mark.gpu
def test_the_kernel_on_a_gpu_samples_from_a_large_vocabulary():
    pytest.importorskip("triton", reason="needs Triton")
    device = on("cuda")
    torch.manual_seed(0)
    for rows in (1, 64, 1088):
        logits = torch.randn(rows, 128_256, device=device) * 3
        temperatures = torch.rand(rows, dtype=torch.float64, device=device) + 0.2
        seeds, positions = (torch.randint(0, 1 << 40, (rows,), device=device) for _ in range(2))
        expected = noise.sample_tokens_on_device(logits, temperatures, seeds, positions)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        tokens = sample_tokens(logits, temperatures, seeds, positions)
        assert torch.equal(tokens, expected)
        assert torch.cuda.max_memory_allocated() - before < 1 << 20
