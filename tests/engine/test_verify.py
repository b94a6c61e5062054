import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.verify import accepted_length
from tests import naive


@given(st.lists(st.integers(0, 2), max_size=10), st.data())
def test_the_longest_right_prefix_is_accepted(draft, data):
    chosen = data.draw(st.lists(st.integers(0, 2), min_size=len(draft) + 1, max_size=len(draft) + 1))
    accepted = accepted_length(np.array(draft, np.uint32), np.array(chosen, np.uint32))
    assert accepted == naive.accepted_length(draft, chosen)
