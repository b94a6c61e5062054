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


def test_read_only_slices_are_accepted():
    progress = progress_of({1: [5], 2: [6]}, limit=4)
    for name in ("tokens", "offsets", "verified", "max_draft"):
        own = getattr(progress, name)
        part = np.concatenate([own, own])[len(own) :]
        part.flags.writeable = False
        replace(progress, **{name: part}).check_arrays()


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


def test_drafts_are_scattered_among_sequences_without_any():
    paths = [Path(array([5, 6]), np.ones(2, np.float32)), Path(array([7]), np.ones(1, np.float32))]
    batch = DraftBatch.from_paths(paths).scatter(np.array([1, 3]), 5)
    assert [batch.tokens_of(index).tolist() for index in range(5)] == [[], [5, 6], [], [7], []]
    assert [batch.parents_of(index).tolist() for index in range(5)] == [[], [-1, 0], [], [-1], []]
