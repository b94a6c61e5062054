"""Drafts from a text's own tokens, against an obvious search."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.device import lookup, lookup_torch
from engine.device.lookup_torch import LONGEST
from engine.device.state import DeviceState
from tests.engine.device.backends import planted

MAX_LENGTH = 40
CASES = 40


def found_in(text, width):
    """The naive twin: the latest of the longest matches, and what follows it."""
    best, place = 0, None
    for candidate in range(1, len(text)):
        match = 0
        while match < min(LONGEST, candidate) and text[candidate - 1 - match] == text[len(text) - 1 - match]:
            match += 1
        if match and match >= best:
            best, place = match, candidate
    if place is None:
        return []
    draft = list(text)
    while len(draft) < len(text) + 2**best:
        draft.append(draft[place + len(draft) - len(text)])
    return draft[len(text) :][:width]


def state_of(texts, device="cpu"):
    state = DeviceState.empty(len(texts), MAX_LENGTH, 1, 0, torch.device(device))
    # What stands behind a text, or in nobody's seat, is no part of it.
    state.history.fill_(1)
    for seat, text in enumerate(texts):
        state.lengths[seat] = len(text)
        state.history[seat, : len(text)] = torch.tensor(text, dtype=torch.int32)
    return state


def drafts_of(look_up, texts, width, device="cpu"):
    """What is found for some texts, and for a seat that nobody has."""
    tokens, counts = look_up(state_of(texts, device), torch.arange(len(texts) + 1, device=device), width)
    assert tokens.shape == (len(texts) + 1, width)
    assert tokens.dtype == counts.dtype == torch.int32
    assert not any(any(row[count:]) for row, count in zip(tokens.tolist(), counts.tolist(), strict=True))
    return [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]


def agrees(look_up, texts, width, device="cpu"):
    return drafts_of(look_up, texts, width, device) == [*(found_in(text, width) for text in texts), []]


def random_texts(seed):
    rng = np.random.default_rng(seed)
    kinds = int(rng.integers(1, 5))
    texts = [rng.integers(0, kinds, rng.integers(1, MAX_LENGTH + 1)).tolist() for _ in range(rng.integers(1, 5))]
    return texts, int(rng.integers(1, 20))


TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=MAX_LENGTH), min_size=1, max_size=4)


@given(TEXTS, st.integers(1, 20))
def test_the_longest_and_latest_match_goes_on(texts, width):
    assert agrees(lookup.looked_up, texts, width)


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ([7], []),
        ([1, 2, 3], []),
        ([1, 2, 3, 1], [2, 3]),
        ([1, 5, 1, 6, 1], [6, 1]),
        ([9, 1, 5, 8, 1, 6, 9, 1], [5, 8, 1, 6]),
        ([4, 4], [4, 4]),
        ([1, 2, 3, 4, 9, 8, 1, 2, 3, 4], [9, 8, 1, 2, 3, 4, 9, 8, 1, 2, 3, 4, 9, 8, 1, 2]),
    ],
)
def test_examples(text, draft):
    assert drafts_of(lookup.looked_up, [text], 16)[0] == draft == found_in(text, 16)


FAULTS = {
    "a later text": ("agrees = (place < lengths)", "agrees = (place <= lengths)"),
    "before the text": ("(place >= back) & ", ""),
    "the earliest": ("matches * texts.shape[1] + place)", "matches * texts.shape[1] - place)"),
    "any match": ("matches = matches + agrees", "matches = matches | agrees"),
    "as many as there is room for": ("2**match, 0)", "width, 0)"),
    "beyond the end": ("column % (lengths - place)", "column % (lengths - place + 1)"),
    "of another place": ("texts.gather(1, place + column", "texts.gather(1, place - 1 + column"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, tmp_path):
    module = planted(lookup_torch, *FAULTS[fault], tmp_path)
    assert all(agrees(lookup.looked_up, *random_texts(seed)) for seed in range(CASES))

    def is_caught(seed):
        try:
            return not agrees(module.looked_up, *random_texts(seed))
        except (RuntimeError, AssertionError):
            return True

    assert any(is_caught(seed) for seed in range(CASES))


def kernel():
    pytest.importorskip("triton", reason="Triton is not installed")
    from engine.device import lookup_triton

    return lookup_triton


def test_the_kernel_finds_the_same(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("the kernel runs on this machine's GPU; nothing is interpreted")
    module = kernel()
    # Several blocks for a text.
    monkeypatch.setattr(module, "BLOCK", 16)
    assert all(agrees(module.looked_up, *random_texts(seed)) for seed in range(CASES))


@pytest.mark.gpu
def test_the_kernel_on_a_gpu_finds_the_same():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert all(agrees(lookup.looked_up, *random_texts(seed), device="cuda") for seed in range(CASES))


KERNEL_FAULTS = {
    "a later text": ("agrees = place < length", "agrees = place <= length"),
    "the last block alone": ("best = tl.maximum(best, ", "best = tl.maximum(0 * best, "),
    "as many as there is room for": ("<< match, 0), width)", "* width, 0), width)"),
    "beyond the end": ("tl.maximum(length - place, 1)", "(length - place + 1)"),
}


@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_faults_in_the_kernel_are_caught(fault, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("the kernel runs on this machine's GPU; nothing is interpreted")
    module = planted(kernel(), *KERNEL_FAULTS[fault], tmp_path)
    module.BLOCK = 16
    assert not all(agrees(module.looked_up, *random_texts(seed)) for seed in range(CASES))


def test_no_value_is_looked_at():
    state = DeviceState.empty(3, MAX_LENGTH, 1, 0, torch.device("meta"))
    tokens, counts = lookup.looked_up(state, torch.arange(4, device="meta"), 5)
    assert tokens.shape == (4, 5)
    assert counts.shape == (4,)
