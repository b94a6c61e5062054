"""Compare the arrays for paged kernels, read as kernels read them, with the tokens that each token attends to."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.layout import (
    flat_masks,
    indptr,
    last_page_lengths,
    paged_keys,
    rows_of,
    segments_of,
)
from engine.speculation.draft_tree import DraftTree
from tests.engine.forward import sequence_of
from tests.engine.steps import batch_of, spans_of
from tests.engine.trees import random_tree

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
