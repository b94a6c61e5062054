"""Suffix arrays that are sorted or merged here have the order of pydivsufsort's, a binding of libdivsufsort.

The library sorts whole suffixes; keys end at a separator or after some tokens. Positions in the library's order
therefore have sorted keys, and only positions with equal keys may be in another order.
"""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ssd.corpus.ring import SEPARATOR, Ring
from ssd.corpus.suffix_array import sort_positions
from ssd.corpus.tier import Merge, Tier, add_sorted
from tests import naive
from tests.ssd.addresses import Text
from tests.ssd.corpora import tiny_slices
from tests.strategies import LARGEST, array, requests

library = pytest.importorskip("pydivsufsort", reason="pydivsufsort is not installed; the extra `dev` has it")

SLOTS = 512
DEPTHS = st.sampled_from([1, 3, 32])


def assert_in_the_order_of_the_library(order, text, depth, oldest=0):
    """Check that `order` has all usable positions of a text from `oldest` on, in the library's order."""
    # A separator before the text ends the keys of the first request, as the slots before a ring's first one do.
    backwards = array([SEPARATOR, *text])[::-1]
    usable = {position for position in naive.usable_positions(text) if position >= oldest}
    expected = [position for position in (len(text) - library.divsufsort(backwards)).tolist() if position in usable]
    assert sorted(order) == sorted(expected)
    assert [naive.key(text, position, depth) for position in order] == [
        naive.key(text, position, depth) for position in expected
    ]


@given(st.one_of(requests(), requests(max_size=40)), DEPTHS)
@example([], 32)
@example([[5]], 32)
@example([[7] * 200], 32)
@example([[7] * 20] * 20, 3)
@example([[LARGEST, LARGEST - 1, LARGEST, LARGEST - 1]], 32)
@example(np.random.default_rng(0).choice([1, 2, 2**31, LARGEST], (20, 80)).tolist(), 8)
def test_sorting(written, depth):
    text = naive.concatenated(written)
    kept, order = Text(text), array(naive.usable_positions(text))
    sort_positions(kept.address, order.ctypes.data, len(order), depth)
    assert_in_the_order_of_the_library(order.tolist(), text, depth)


@given(st.lists(requests(), min_size=2, max_size=2), DEPTHS, st.integers(0, SLOTS - 1), st.data())
def test_merging(written, depth, start, data):
    """At once, and in slices that leave out old positions; the text may continue at the first slot of its ring."""
    texts = [naive.concatenated(part) for part in written]
    text = [*texts[0], *texts[1]]
    oldest = data.draw(st.integers(0, len(text)), "oldest")
    at_once, base, added = Tier(SLOTS), Tier(SLOTS), Tier(SLOTS)
    with tiny_slices():
        ring = Ring(SLOTS)
        ring.write(np.full(start, SEPARATOR))
        ring.oldest = start
        for tokens, tier in zip(texts, (base, added), strict=True):
            first = ring.head
            ring.write(array(tokens))
            add_sorted(tier, ring, first, depth)
            add_sorted(at_once, ring, first, depth)
        merge = Merge(base, added.newest, ring, start + oldest, depth)
        while not merge.step():
            pass

    def positions(tier):
        return ((tier.newest.positions.astype(np.int64) - start) % SLOTS).tolist()

    assert_in_the_order_of_the_library(positions(at_once), text, depth)
    assert_in_the_order_of_the_library(positions(base), text, depth, oldest)
