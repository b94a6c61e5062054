"""Which draft the device picks once it knows the tokens, against `ssd.follow`, which the host uses."""

import numpy as np
import pytest
import torch

from engine.executor.device_state import DeviceState
from engine.executor.kernels import follow_torch
from engine.executor.kernels.tensors import Prepared
from ssd.follow import follow as follow_on_host
from ssd.types import DraftBatch, Path, offsets_of
from tests.engine.executor.kernels.implementations import interpreted_kernels, planted

CASES = 300
KERNEL_CASES = 60
LONGEST = 12


def random_case(seed):
    """Texts of few tokens, paths for earlier ones of them, and how much of each may be verified."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 2, rng.integers(1, LONGEST + 1)).astype(np.uint32) for _ in range(rng.integers(1, 5))]
    lengths = [int(rng.integers(max(1, len(text) - 4), len(text) + 1)) for text in texts]
    paths = []
    for text, length in zip(texts, lengths, strict=True):
        path = np.concatenate([text[length:], rng.integers(0, 2, 5)])[: rng.integers(0, 8)]
        is_wrong = rng.random(len(path)) < 0.1
        paths.append(np.where(is_wrong, 1 - path, path).astype(np.uint32))
    return rng, texts, lengths, paths, rng.integers(0, 6, len(texts))


def expected(texts, lengths, paths, most, width):
    drafts = DraftBatch.from_paths([Path(path, np.ones(len(path), np.float32)) for path in paths])
    produced = [text[length:] for text, length in zip(texts, lengths, strict=True)]
    bounds = offsets_of(np.array([len(tokens) for tokens in produced]))
    left = follow_on_host(drafts, np.arange(len(texts)), np.concatenate(produced), bounds)
    return [left.tokens_of(index)[: min(width, most[index])].tolist() for index in range(len(texts))]


def agrees(module, seed, device="cpu"):
    rng, texts, lengths, paths, most = random_case(seed)
    state = DeviceState.empty(len(texts), LONGEST, 1, 0, torch.device(device))
    for seat, text in enumerate(texts):
        state.lengths[seat] = len(text)
        state.history[seat] = 9
        state.history[seat, : len(text)] = torch.from_numpy(text.astype(np.int32))
    width = int(rng.integers(1, 5))
    tokens = rng.integers(0, 2, (len(texts), 8)).astype(np.int32)
    for row, path in zip(tokens, paths, strict=True):
        row[: len(path)] = path
    columns = (tokens, np.array([len(path) for path in paths]), np.array(lengths), most)
    prepared = Prepared(*(torch.from_numpy(column.astype(np.int32)).to(device) for column in columns))
    drafts = module.followed(state, torch.arange(len(texts), device=device), prepared, width)
    assert drafts.tokens.shape == (len(texts), width)
    picked = [row[:size] for row, size in zip(drafts.tokens.tolist(), drafts.lengths.tolist(), strict=True)]
    return picked == expected(texts, lengths, paths, most, width)


def test_what_follows_is_what_the_host_would_pick():
    assert all(agrees(follow_torch, seed) for seed in range(CASES))
    assert sum(any(expected(*random_case(seed)[1:], 4)) for seed in range(CASES)) > CASES / 4


FAULTS = {
    "whatever was committed": ("torch.where(fits, left, 0)", "left"),
    "from the beginning": ("(committed + torch.arange(width", "(0 * committed + torch.arange(width"),
    "more than is left": ("prepared.sizes - committed[:, 0]", "prepared.sizes"),
    "more than asked for": ("- committed[:, 0], prepared.most)", "- committed[:, 0], prepared.most + 1)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, tmp_path):
    module = planted(follow_torch, *FAULTS[fault], tmp_path)
    assert not all(agrees(module, seed) for seed in range(CASES))


def test_the_kernel_picks_the_same():
    module = interpreted_kernels("follow_triton")
    assert all(agrees(module, seed) for seed in range(KERNEL_CASES))


KERNEL_FAULTS = {
    "what came is not looked at": ("tl.where(differs > 0, 0, ", "tl.where(differs > 1, 0, "),
    "more than it has": ("tl.load(sizes + sequence * sizes_stride) - committed", "width + 0 * committed"),
    "from its beginning": ("path + committed + place", "path + place"),
    "of the step before": ("base + column, mask", "base - 1 + column, mask"),
}


@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_faults_in_the_kernel_are_caught(fault, tmp_path):
    module = planted(interpreted_kernels("follow_triton"), *KERNEL_FAULTS[fault], tmp_path)
    assert not all(agrees(module, seed) for seed in range(KERNEL_CASES))


@pytest.mark.gpu
def test_the_kernel_on_a_gpu_picks_the_same():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from engine.executor.kernels import follow

    assert all(agrees(follow, seed, "cuda") for seed in range(CASES))
