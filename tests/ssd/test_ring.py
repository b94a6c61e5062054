import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.ring import SEPARATOR, Ring
from tests import naive
from tests.strategies import LARGEST, array, requests


@given(requests(), st.integers(2, 30))
def test_ring_holds_the_newest_tokens(written, capacity):
    ring = Ring(capacity)
    for request in written:
        ring.append(array(request))
    expected = naive.ring_text(written, capacity)
    assert ring.text().tolist() == expected
    assert len(ring) == len(expected)


def test_text_is_a_copy():
    ring = Ring(4)
    ring.append(array([1, 2]))
    before = ring.text()
    ring.append(array([3, 4]))
    assert before.tolist() == [1, 2, SEPARATOR]


def test_largest_id_is_kept_and_the_separator_refused():
    ring = Ring(8)
    ring.append(array([LARGEST]))
    with pytest.raises(ValueError, match=r"4,294,967,294"):
        ring.append(array([1, int(SEPARATOR)]))
    assert ring.text().tolist() == [LARGEST, SEPARATOR]


@pytest.mark.parametrize("capacity", [-1, 0, 1, 1 << 29])
def test_impossible_capacities_are_refused(capacity):
    with pytest.raises(ValueError, match="a ring holds"):
        Ring(capacity)


def test_appending_nothing_changes_nothing():
    ring = Ring(4)
    ring.append(np.empty(0, np.uint32))
    assert ring.appended == 0
