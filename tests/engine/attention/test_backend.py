"""Choice of the backend, and the arrays and the cache that paged kernels get."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.backend import choose_backend, make_attention, make_ops
from engine.attention.calls import PagedCache
from engine.attention.layout import (
    flat_masks,
    indptr,
    last_page_lengths,
    paged_keys,
    rows_of,
    segments_of,
)
from engine.attention.plain import PlainAttention
from engine.commands.launch import find_device, find_dtype
from engine.executor import optional
from engine.models.config import ModelConfig
from engine.models.layers import PLAIN
from engine.speculation.draft_tree import DraftTree
from ssd.errors import UserError
from tests.engine.forward import sequence_of
from tests.engine.steps import batch_of, spans_of
from tests.engine.trees import random_tree

CONFIG = ModelConfig(9, 64, 8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=64, max_positions=64)
NARROW = ModelConfig(9, 64, 8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16, max_positions=64)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr("engine.attention.backend.has_flashinfer", lambda: True)
    monkeypatch.setattr("engine.attention.backend.flashinfer", lambda: None)


@pytest.fixture
def missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    optional.flashinfer.cache_clear()
    yield
    optional.flashinfer.cache_clear()


@pytest.mark.parametrize(
    ("config", "dtype", "device", "expected"),
    [
        (CONFIG, torch.bfloat16, "cuda:0", "flashinfer"),
        (CONFIG, torch.float16, "cuda", "flashinfer"),
        (CONFIG, torch.float32, "cuda", "plain"),
        (CONFIG, torch.bfloat16, "cpu", "plain"),
        (NARROW, torch.bfloat16, "cuda", "plain"),
    ],
)
def test_auto_selects_flashinfer_if_it_can_run(installed, config, dtype, device, expected):
    assert choose_backend("auto", config, dtype, device) == expected
    assert choose_backend("plain", config, dtype, device) == "plain"
    if expected == "flashinfer":
        assert choose_backend("flashinfer", config, dtype, device) == "flashinfer"


def test_auto_selects_plain_if_flashinfer_is_not_installed(monkeypatch):
    monkeypatch.setattr("engine.attention.backend.has_flashinfer", lambda: False)
    assert choose_backend("auto", CONFIG, torch.bfloat16, "cuda") == "plain"


@pytest.mark.parametrize(
    ("config", "dtype", "device", "words"),
    [
        (CONFIG, torch.bfloat16, "cpu", "--device cuda"),
        (CONFIG, torch.float32, "cuda", "--dtype bfloat16"),
        (NARROW, torch.bfloat16, "cuda", "heads of 16"),
    ],
)
def test_flashinfer_is_refused_with_a_reason_if_it_cannot_run(installed, config, dtype, device, words):
    with pytest.raises(UserError, match=words) as refusal:
        choose_backend("flashinfer", config, dtype, device)
    assert "\n" not in str(refusal.value)


def test_the_error_for_a_missing_library_says_how_to_install_it(missing):
    with pytest.raises(UserError, match=r"pip install '\.\[gpu\]'"):
        choose_backend("flashinfer", CONFIG, torch.bfloat16, "cuda")


def test_plain_attention_does_not_need_flashinfer(missing):
    assert isinstance(make_attention("plain", CONFIG, 2, 16, torch.float32, "cpu"), PlainAttention)
    assert make_ops("plain") is PLAIN


def test_devices_and_dtypes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto") == "cpu"
    assert find_device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_device("auto") == "cuda"
    assert find_dtype("auto", "cpu") == torch.float32
    assert find_dtype("auto", "cuda:1") == torch.bfloat16
    assert find_dtype("float16", "cpu") == torch.float16


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "meta:x", "meta", "hpu"])
def test_missing_devices_are_refused(device):
    with pytest.raises(UserError, match="--device"):
        find_device(device)


def test_move_reads_all_slots_before_it_writes():
    config = ModelConfig(9, 8, 8, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=4, max_positions=64)
    cache = PagedCache(config, 4, 8, torch.float32, "cpu")
    assert cache.layers.shape == (2, 4, 2, 8, 2, 4)
    cache.layers.copy_(torch.randn(cache.layers.shape, generator=torch.Generator().manual_seed(0)))
    before = cache.layers.clone()
    sources, targets = np.array([9, 10, 31, 2]), np.array([8, 9, 10, 30])
    cache.move(sources, targets)
    expected = before.clone()
    for source, target in zip(sources, targets, strict=True):
        expected[:, target // 8, :, target % 8] = before[:, source // 8, :, source % 8]
    assert torch.equal(cache.layers, expected)
    assert not torch.equal(expected, before)


PAGE_SIZES = st.sampled_from([1, 4, 16])


@st.composite
def batches(draw, page_size):
    """A batch, and for each token the indices within its sequence that it attends to."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000), "seed"))
    sequences, sees = [], []
    for _ in range(draw(st.integers(1, 5), "sequences")):
        computed, scheduled = draw(st.sampled_from([0, 1, 15, 16, 17, 40])), draw(st.sampled_from([1, 1, 2, 20]))
        draft, parents = random_tree(rng, [], draw(st.sampled_from([0, 3, 40])), 9)
        is_tree = len(draft) > 0 and draw(st.booleans())
        end = computed + scheduled
        pages = rng.permutation(-(-(end + len(draft)) // page_size) + 2).tolist()
        sequence = sequence_of(np.zeros(end), pages, computed=computed, draft=draft)
        sees += [set(range(place + 1)) for place in range(computed, end)]
        for node, parent in enumerate(parents):
            if not is_tree:
                sees.append(set(range(end + node + 1)))
                continue
            ancestors = {end + node}
            while parent >= 0:
                ancestors.add(end + parent)
                parent = parents[parent]
            sees.append(set(range(end)) | ancestors)
        sequence.tree = DraftTree(np.array(parents, np.int32)) if is_tree else None
        sequences.append(sequence)
    return batch_of(sequences, page_size), sees


def span_at(batch, row):
    return next(span for span in spans_of(batch) if span.start <= row < span.start + span.length)


def slots_of(pages, places, page_size):
    return [pages[place // page_size] * page_size + place % page_size for place in sorted(places)]


@given(st.data(), PAGE_SIZES)
def test_segments_cover_a_batch_with_the_right_masks(data, page_size):
    batch, sees = data.draw(batches(page_size))
    segments = segments_of(batch)
    rows = [row for segment in segments for row in range(segment.start, segment.start + segment.length)]
    assert rows == list(range(len(batch.tokens)))
    row = 0
    for segment in segments:
        # The mask among the segment's tokens.
        own = flat_masks([segment]).reshape(segment.length, -1)
        assert own.any(axis=1).all()
        for seen in own:
            assert set(range(segment.context)) | set(segment.context + np.flatnonzero(seen)) == sees[row]
            assert segment.pages == span_at(batch, row).pages
            row += 1


@given(st.data(), PAGE_SIZES)
def test_paged_keys_address_all_slots(data, page_size):
    batch, _ = data.draw(batches(page_size))
    segments = segments_of(batch)
    tables = [segment.pages for segment in segments]
    for lengths in ([segment.keys for segment in segments], [segment.context for segment in segments]):
        keys = paged_keys(tables, lengths, page_size)
        assert all(array.dtype == np.int32 for array in keys)
        for index, length in enumerate(lengths):
            begin, end = keys.indptr[index : index + 2]
            assert end > begin
            # Kernels compute the length like this.
            assert (end - begin - 1) * page_size + keys.last_page_len[index] == length
            expected = slots_of(tables[index], range(length), page_size)
            assert slots_of(keys.indices[begin:end].tolist(), range(length), page_size) == expected


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 40)), min_size=1), PAGE_SIZES)
def test_true_lengths_fit_into_the_plan_of_their_upper_bounds(lengths, page_size):
    bounds = [true + more for true, more in lengths]
    table = list(range(150))
    planned = paged_keys([table] * len(bounds), bounds, page_size)
    counts = np.diff(planned.indptr)
    corrected = last_page_lengths([true for true, _ in lengths], counts, page_size)
    # Kernels use unsigned arithmetic, in which negative numbers wrap around.
    read = (counts - 1).astype(np.uint32) * np.uint32(page_size) + corrected.astype(np.uint32)
    assert read.tolist() == [true for true, _ in lengths]
    # The device only has to subtract the rejected tokens.
    assert (planned.last_page_len - [more for _, more in lengths]).tolist() == corrected.tolist()


@given(st.data())
def test_rows_of_segments_are_their_rows_in_the_batch(data):
    batch, _ = data.draw(batches(16))
    for is_tree in (False, True):
        segments = [segment for segment in segments_of(batch) if (segment.mask is not None) == is_tree]
        if segments:
            rows = [row for one in segments for row in range(one.start, one.start + one.length)]
            assert np.arange(len(batch.tokens))[rows_of(segments)].tolist() == rows


def test_indptr_begins_with_0():
    assert indptr([3, 0, 2]).tolist() == [0, 3, 3, 5]
