"""Compare tokens sampled on the device with those of one unsplit computation."""

import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from engine.executor.kernels import sample
from engine.executor.kernels.sample import sample_tokens
from engine.sampling import noise
from engine.sampling.noise import (
    WORKSPACE_BYTES,
    Limits,
    greedy_tokens,
    gumbel_noise,
    sample_tokens_on_device,
    truncate,
)
from engine.scheduling.request import GREEDY_BELOW
from tests.engine.executor.kernels.implementations import INTERPRETED, on, require_interpreter

CASES = 40
VOCAB = 50
INFINITE = float("inf")


def random_rows(seed, device="cpu"):
    """Logits with ties and forbidden tokens, and settings of each row."""
    rng = np.random.default_rng(seed)
    rows, vocab = int(rng.choice([1, 2, 5])), int(rng.choice([1, 15, 16, 40, 70]))
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


def agrees(implementation, seed, device="cpu"):
    given = random_rows(seed, device)
    tokens = implementation(*given)
    assert tokens.dtype == torch.int64
    return torch.equal(tokens, sampled_in_one_part(*given))


def test_rows_sampled_in_parts_give_the_same_tokens(monkeypatch):
    assert all(agrees(sample_tokens.torch, seed) for seed in range(CASES))
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


def sampled_without_limits(logits, temperatures, seeds, _):
    return noise.sample_tokens_on_device(logits, temperatures, seeds, seeds)


def sampled_from_few(logits, temperatures, seeds, limits):
    return noise.sample_tokens_on_device(logits, temperatures, seeds, seeds, limits)


def ranked(logits, temperatures, _, limits):
    return noise.lowest_scores(logits, temperatures, limits)


@pytest.mark.parametrize(
    ("function", "most"),
    [(sampled_without_limits, 0), (sampled_from_few, 64), (ranked, 128_256)],
    ids=["all", "few", "rank"],
)
def test_memory_is_bounded(function, most, monkeypatch):
    assert WORKSPACE_BYTES / 4 < memory_of(function, most) < WORKSPACE_BYTES
    monkeypatch.setattr(noise, "WORKSPACE_BYTES", WORKSPACE_BYTES << 10)
    assert memory_of(function, most) > 10 * WORKSPACE_BYTES


@pytest.fixture
def small_blocks(monkeypatch):
    """Make a module's kernel use several blocks per part, and several parts per row."""
    require_interpreter()

    def of(module, programs=12):
        monkeypatch.setattr(module, "BLOCK", 16)
        monkeypatch.setattr(module, "PROGRAMS", programs)
        return INTERPRETED.of(module.sample_tokens)

    return of


@pytest.mark.parametrize("programs", [1, 12, 1000])
def test_the_kernel_equals_the_reference(programs, small_blocks):
    kernel = small_blocks(sample, programs)
    assert all(agrees(kernel, seed) for seed in range(12))


def test_the_kernel_accepts_strided_rows_and_no_rows(small_blocks):
    logits, *row_settings, _ = random_rows(2)
    assert logits.shape[1] > 1
    spaced = torch.nn.functional.pad(logits, (0, 5), value=99)[:, : logits.shape[1]]
    kernel = small_blocks(sample)
    assert torch.equal(kernel(spaced, *row_settings), sampled_in_one_part(logits, *row_settings, None))
    assert kernel(*(column[:0] for column in (logits, *row_settings))).shape == (0,)


def test_the_kernel_treats_nan_as_the_largest_score(small_blocks):
    logits = torch.tensor([[0.0, 1, float("nan"), 5, float("nan")], [0.0, 9, 2, 3, 4]])
    for temperature in (0.0, 1.0):
        row_settings = torch.full((2,), temperature, dtype=torch.float64), torch.arange(2), torch.arange(2)
        expected = sampled_in_one_part(logits, *row_settings, None)
        assert small_blocks(sample)(logits, *row_settings).tolist() == expected.tolist()


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


settings_of_rows = st.tuples(
    st.sampled_from([0.0, GREEDY_BELOW, 0.3, 1.0, 5.0]),
    st.sampled_from([-1, 0, 1, 7, 1000]),
    st.sampled_from([1.0, 0.9, 0.3, 1e-9]),
    st.sampled_from([0.0, 0.05, 1.0]),
)


@settings(max_examples=60)
@given(rows=st.lists(settings_of_rows, min_size=1, max_size=6), truncates=st.booleans(), seed=st.integers(0, 1 << 40))
def test_the_kernel_of_cpus_gives_the_tokens_of_pytorch(rows, truncates, seed):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 3, (len(rows), VOCAB)).astype(np.float32))
    temperatures, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    keys = (torch.from_numpy(rng.integers(-(1 << 40), 1 << 40, len(rows))) for _ in range(2))
    arguments = (logits, temperatures.double(), *keys)
    limits = Limits(top_k, top_p.double(), min_p.double(), VOCAB) if truncates else None
    assert torch.equal(sample_tokens(*arguments, limits), sample_tokens_on_device(*arguments, limits))
