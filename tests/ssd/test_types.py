"""Checks of the arrays of `Progress`."""

from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.types import DraftBatch, Path, Progress
from tests.replay import progress_of
from tests.strategies import array

UINT32_FIELDS = ("tokens", "offsets", "verified", "max_draft")


@pytest.mark.parametrize(
    "committed", [{}, {1: []}, {1: [5]}, {1: [], 2: [5, 6], 3: [7]}, {number: [1] for number in range(64)}]
)
def test_consistent_arrays_are_accepted(committed):
    progress_of(committed, limit=4).check_arrays()


def test_read_only_slices_are_accepted():
    progress = progress_of({1: [5], 2: [6]}, limit=4)
    for name in UINT32_FIELDS:
        own = getattr(progress, name)
        part = np.concatenate([own, own])[len(own) :]
        part.flags.writeable = False
        replace(progress, **{name: part}).check_arrays()


@pytest.mark.parametrize("field", UINT32_FIELDS)
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint64, np.float32, ">u4"])
def test_the_error_names_the_field_of_another_dtype(field, dtype):
    progress = progress_of({1: [5], 2: [6]}, limit=4)
    with pytest.raises(ValueError, match=rf"^{field} must be a contiguous 1-D uint32 array, not "):
        replace(progress, **{field: getattr(progress, field).astype(dtype)}).check_arrays()


@pytest.mark.parametrize("field", ["sequence_ids", *UINT32_FIELDS])
def test_lists_are_not_arrays(field):
    progress = progress_of({1: [5], 2: [6]}, limit=4)
    with pytest.raises(ValueError, match=rf"^{field} must be a .*array, not a list$"):
        replace(progress, **{field: getattr(progress, field).tolist()}).check_arrays()


@pytest.mark.parametrize("counts", [np.zeros(4, np.uint32)[::2], np.zeros((2, 1), np.uint32)], ids=["gaps", "table"])
def test_the_error_names_the_field_of_another_layout(counts):
    with pytest.raises(ValueError, match=r"^verified must be a contiguous 1-D uint32 array, not "):
        replace(progress_of({1: [5], 2: [6]}, limit=4), verified=counts).check_arrays()


@given(st.integers(0, 4), st.lists(st.integers(0, 6), max_size=6), st.integers(0, 6))
def test_offsets_are_accepted_only_if_they_partition_the_tokens(sequences, offsets, tokens):
    counts = array([0] * sequences)
    ids = np.arange(sequences, dtype=np.uint64)
    progress = Progress(ids, array([1] * tokens), array(offsets), counts, counts)
    runs = [range(first, end) for first, end in pairwise(offsets)]
    is_partition = offsets[:1] == [0] and list(chain(*runs)) == list(range(tokens))
    if len(offsets) == sequences + 1 and is_partition and offsets == sorted(offsets):
        progress.check_arrays()
    else:
        with pytest.raises(ValueError, match=r"^offsets "):
            progress.check_arrays()


@pytest.mark.parametrize("field", ["verified", "max_draft"])
@pytest.mark.parametrize("size", [0, 1, 3])
def test_counts_have_one_element_per_sequence(field, size):
    progress = progress_of({1: [5], 2: [6]}, limit=4)
    with pytest.raises(ValueError, match=rf"^{field} has {size} elements, not 2: one per sequence$"):
        replace(progress, **{field: array([0] * size)}).check_arrays()


def test_drafts_are_scattered_among_sequences_without_any():
    paths = [Path(array([5, 6]), np.ones(2, np.float32)), Path(array([7]), np.ones(1, np.float32))]
    batch = DraftBatch.from_paths(paths).scatter(np.array([1, 3]), 5)
    assert [batch.tokens_of(index).tolist() for index in range(5)] == [[], [5, 6], [], [7], []]
    assert [batch.parents_of(index).tolist() for index in range(5)] == [[], [-1, 0], [], [-1], []]
