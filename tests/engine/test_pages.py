import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pages import PagePool


@given(st.lists(st.one_of(st.integers(0, 60), st.just(None)), max_size=40))
def test_every_page_is_free_or_owned_once(actions):
    """A number takes pages for that many tokens, None gives the oldest ones back."""
    pool = PagePool(12, 8)
    owned = []
    for action in actions:
        if action is None:
            if owned:
                pool.give_back(owned.pop(0))
        elif pool.can_take(action):
            taken = pool.take(action)
            assert len(taken) * 8 >= action > (len(taken) - 1) * 8
            owned.append(taken)
        else:
            with pytest.raises(ValueError, match="pages wanted"):
                pool.take(action)
        pool.check_integrity(owned)


def test_integrity_notices_a_lost_and_a_shared_page():
    pool = PagePool(4, 8)
    pages = pool.take(16)
    with pytest.raises(AssertionError):
        pool.check_integrity([])
    with pytest.raises(AssertionError):
        pool.check_integrity([pages, pages])


def test_pages_of_a_fresh_pool_are_neighbours():
    assert PagePool(8, 16).take(60) == [0, 1, 2, 3]
