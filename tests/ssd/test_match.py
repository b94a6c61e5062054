import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from ssd.match import find, sample_positions
from ssd.order import full_order
from tests import naive
from tests.strategies import LARGEST, array, corpus_and_context


@given(corpus_and_context(), st.sampled_from([1, 3, 32]), st.sampled_from([12, 1000]))
@example(([], [1, 2]), 32, 1000)
@example(([[1]], [1]), 32, 1000)
@example(([[1, 2, 3]], []), 32, 1000)
@example(([[1, 2], [3, 4]], [2, 3]), 32, 1000)  # nothing may match from one request into the next
@example(([[7] * 20], [7] * 50), 32, 1000)
@example(([[1, 2]], [9, 8, 7, 6, 5, 4, 3, 1]), 32, 1000)  # a context longer than the corpus
@example(([[LARGEST, 0, LARGEST]], [LARGEST]), 32, 1000)
def test_find_gives_every_occurrence_of_the_longest_match(corpus, depth, capacity):
    requests, context = corpus
    text = naive.ring_text(requests, capacity)
    order = full_order(array(text))
    match = find(array(text), order, array(context), len(context), depth)
    positions, length = naive.longest_match(text, context, depth)
    assert match.length == length
    assert set(order[match.left : match.right].tolist()) == positions
    assert match.right - match.left == len(positions)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 40))
def test_samples_are_spread_evenly_and_never_repeat(left, size, limit):
    order = np.arange(1000, dtype=np.uint32)
    positions = np.zeros(limit, np.uint32)
    count = sample_positions(order, left, left + size, limit, positions)
    taken = positions[:count].astype(int)
    assert count == min(size, limit)
    assert all(left <= position < left + size for position in taken)
    steps = np.diff(taken)
    assert (steps >= 1).all()
    assert len(steps) == 0 or steps.max() - steps.min() <= 1
