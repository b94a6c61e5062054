"""The ring buffer: its slots, the slots repeated at its ends, and the tokens that it accepts."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ssd.corpus import ring as ring_module
from ssd.corpus.index import GAP_PART
from ssd.corpus.ring import MAX_CAPACITY, MAX_SLOTS, PAD, SEPARATOR, Ring, check_capacity
from tests.ssd.addresses import uint32_at
from tests.strategies import array, examples

CAPACITY = 300


@pytest.fixture(autouse=True, scope="module")
def small_rings():
    """Allow rings of a few hundred slots, so that a few tokens wrap around."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_module, "MIN_CAPACITY", 2 * PAD)
        yield


def with_pads(ring):
    """Return all memory that a kernel may read: PAD slots before slot 0, the slots, and PAD slots after them."""
    return uint32_at(ring.address - 4 * PAD, PAD + ring.capacity + PAD).tolist()


@given(st.lists(st.tuples(st.integers(0, CAPACITY), st.integers(0, CAPACITY)), max_size=12))
@example([(PAD - 1, 0), (1, 0)])
@example([(CAPACITY - PAD, 0), (1, 0)])
@examples(100)
def test_each_end_repeats_the_other_after_any_writes(steps):
    ring = Ring(CAPACITY)
    written = []
    for size, forgotten in steps:
        ring.oldest = min(ring.head, ring.oldest + forgotten)
        size = min(size, ring.free)
        tokens = np.arange(len(written) + 1, len(written) + 1 + size, dtype=np.uint32)
        ring.write(tokens)
        written += tokens.tolist()
        assert ring.head == len(written)
        assert len(ring) == ring.head - ring.oldest
        assert ring.free == CAPACITY - len(ring)
        slots = [SEPARATOR] * CAPACITY
        for position, token in enumerate(written):
            slots[position % CAPACITY] = token
        everything = with_pads(ring)
        shown = everything[PAD:-PAD]
        # Only the last of the unwritten slots are read.
        assert shown[: len(written)] == slots[: len(written)]
        assert shown[-PAD:] == slots[-PAD:]
        assert everything[:PAD] == shown[-PAD:]
        assert not written or everything[-PAD:] == shown[:PAD]
        assert ring.read(ring.oldest, ring.head).tolist() == written[ring.oldest :]


@given(st.integers(0, 3 * CAPACITY), st.integers(0, CAPACITY))
@examples(100)
def test_erased_positions_are_separators_also_in_the_padding(position, size):
    ring = Ring(CAPACITY)
    for _ in range(4):
        ring.write(np.full(CAPACITY - 1, 5, np.uint32))
        ring.oldest = ring.head
    ring.erase(position, position + size)
    changed = {(position + index) % CAPACITY for index in range(size)}
    everything = with_pads(ring)
    shown = everything[PAD:-PAD]
    assert [token == SEPARATOR for token in shown] == [slot in changed for slot in range(CAPACITY)]
    assert everything[:PAD] == shown[-PAD:]
    assert everything[-PAD:] == shown[:PAD]


def test_reading_returns_a_copy():
    ring = Ring(CAPACITY)
    ring.write(array([1, 2]))
    before = ring.read(0, 2)
    ring.erase(0, 2)
    assert before.tolist() == [1, 2]


@pytest.mark.parametrize("capacity", [-1, 0, 2 * PAD - 1, 1 << 32])
def test_impossible_capacities_are_refused(capacity):
    with pytest.raises(ValueError, match="a ring has"):
        Ring(capacity)


def test_the_ring_of_the_largest_corpus_has_no_more_slots_than_32_bits_count():
    check_capacity(MAX_CAPACITY)
    assert MAX_CAPACITY + MAX_CAPACITY // GAP_PART <= MAX_SLOTS < MAX_CAPACITY + MAX_CAPACITY // GAP_PART + 17
    with pytest.raises(ValueError, match=f"{MAX_CAPACITY:,} tokens, not {MAX_SLOTS:,}"):
        check_capacity(MAX_SLOTS)
