"""The sizes of a ring; tests.ssd.corpus.test_history compares its contents with a list."""

import pytest

from ssd.corpus.index import GAP_PART
from ssd.corpus.ring import MAX_CAPACITY, MAX_SLOTS, MIN_CAPACITY, Ring, check_capacity


@pytest.mark.parametrize("capacity", [-1, 0, MIN_CAPACITY - 1, 1 << 32])
def test_impossible_capacities_are_refused(capacity):
    with pytest.raises(ValueError, match="a ring has"):
        Ring(capacity)


def test_the_ring_of_the_largest_corpus_has_no_more_slots_than_32_bits_count():
    check_capacity(MAX_CAPACITY)
    assert MAX_CAPACITY + MAX_CAPACITY // GAP_PART <= MAX_SLOTS < MAX_CAPACITY + MAX_CAPACITY // GAP_PART + 17
    with pytest.raises(ValueError, match=f"{MAX_CAPACITY:,} tokens, not {MAX_SLOTS:,}"):
        check_capacity(MAX_SLOTS)
