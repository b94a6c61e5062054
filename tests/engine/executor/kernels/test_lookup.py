"""Drafts from a text's own tokens, against an obvious search."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.executor.device_state import DeviceState
from engine.executor.kernels import lookup, lookup_torch
from engine.executor.kernels.lookup_torch import LONGEST
from engine.executor.kernels.tensors import Drafts
from tests.engine.executor.kernels.implementations import interpreted_kernels, planted

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


def drafts_of(module, texts, width, device="cpu"):
    """What is found for some texts, and for a seat that nobody has."""
    integers = {"dtype": torch.int32, "device": device}
    none = Drafts(torch.zeros(len(texts) + 1, width, **integers), torch.zeros(len(texts) + 1, **integers))
    spare = torch.full((len(texts) + 1,), width, **integers)
    drafts, found = module.completed(state_of(texts, device), torch.arange(len(texts) + 1, device=device), none, spare)
    tokens, counts = drafts.tokens, drafts.lengths
    assert found.tolist() == (counts > 0).int().tolist()
    assert tokens.shape == (len(texts) + 1, width)
    assert tokens.dtype == counts.dtype == torch.int32
    assert not any(any(row[count:]) for row, count in zip(tokens.tolist(), counts.tolist(), strict=True))
    return [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]


def agrees(module, texts, width, device="cpu"):
    return drafts_of(module, texts, width, device) == [*(found_in(text, width) for text in texts), []]


def random_texts(seed):
    rng = np.random.default_rng(seed)
    kinds = int(rng.integers(1, 5))
    texts = [rng.integers(0, kinds, rng.integers(1, MAX_LENGTH + 1)).tolist() for _ in range(rng.integers(1, 5))]
    return texts, int(rng.integers(1, 20))


TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=MAX_LENGTH), min_size=1, max_size=4)


@given(TEXTS, st.integers(1, 20))
def test_the_longest_and_latest_match_goes_on(texts, width):
    assert agrees(lookup, texts, width)


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
    assert drafts_of(lookup, [text], 16)[0] == draft == found_in(text, 16)


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
    assert all(agrees(lookup, *random_texts(seed)) for seed in range(CASES))

    def is_caught(seed):
        try:
            return not agrees(module, *random_texts(seed))
        except (RuntimeError, AssertionError):
            return True

    assert any(is_caught(seed) for seed in range(CASES))


def test_the_kernel_finds_the_same(monkeypatch):
    module = interpreted_kernels("lookup_triton")
    # Several blocks for a text.
    monkeypatch.setattr(module, "BLOCK", 16)
    assert all(agrees(module, *random_texts(seed)) for seed in range(CASES))


@pytest.mark.gpu
def test_the_kernel_on_a_gpu_finds_the_same():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert all(agrees(lookup, *random_texts(seed), device="cuda") for seed in range(CASES))


KERNEL_FAULTS = {
    "a later text": ("agrees = place < length", "agrees = place <= length"),
    "the last block alone": ("best = tl.maximum(best, ", "best = tl.maximum(0 * best, "),
    "as many as there is room for": ("<< match, 0), room)", "* width, 0), room)"),
    "beyond the end": ("tl.maximum(length - place, 1)", "(length - place + 1)"),
}


@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_faults_in_the_kernel_are_caught(fault, tmp_path):
    module = planted(interpreted_kernels("lookup_triton"), *KERNEL_FAULTS[fault], tmp_path)
    module.BLOCK = 16
    assert not all(agrees(module, *random_texts(seed)) for seed in range(CASES))


def only_where_empty(module, seed):
    """Whether drafts that are there stay, and none is longer than its room."""
    texts, width = random_texts(seed)
    rng = np.random.default_rng(seed)
    count = len(texts)
    lengths, spare = rng.integers(0, 2, count) * rng.integers(0, width + 1, count), rng.integers(0, width + 1, count)
    tokens = np.where(np.arange(width) < lengths[:, None], 9, 0)
    given = Drafts(*(torch.from_numpy(array.astype(np.int32)) for array in (tokens, lengths)))
    # A column of a wider array, as the engine has it.
    column = torch.from_numpy(np.stack((spare, spare + 1), axis=1).astype(np.int32))[:, 0]
    drafts, found = module.completed(state_of(texts), torch.arange(count), given, column)
    for index, text in enumerate(texts):
        looked = found_in(text, width)[: spare[index]]
        expected = [9] * lengths[index] or looked
        if drafts.tokens[index].tolist() != expected + [0] * (width - len(expected)):
            return False
        if int(found[index]) != int(not lengths[index] and len(looked) > 0):
            return False
    return True


def test_only_empty_drafts_are_completed():
    assert all(only_where_empty(lookup, seed) for seed in range(CASES))


def test_the_kernel_completes_only_empty_drafts():
    assert all(only_where_empty(interpreted_kernels("lookup_triton"), seed) for seed in range(CASES))


def test_no_value_is_looked_at():
    state = DeviceState.empty(3, MAX_LENGTH, 1, 0, torch.device("meta"))
    none = torch.zeros(4, dtype=torch.int32, device="meta")
    drafts, found = lookup.completed(
        state, torch.arange(4, device="meta"), Drafts(none[:, None].expand(-1, 5), none), none
    )
    assert drafts.tokens.shape == (4, 5)
    assert found.shape == (4,)
