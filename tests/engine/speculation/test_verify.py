import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.verify import accepted_length, accepted_path
from tests import naive


@given(st.lists(st.integers(0, 2), max_size=10), st.data())
def test_the_longest_right_prefix_is_accepted(draft, data):
    chosen = data.draw(st.lists(st.integers(0, 2), min_size=len(draft) + 1, max_size=len(draft) + 1))
    accepted = accepted_length(np.array(draft, np.uint32), np.array(chosen, np.uint32))
    assert accepted == naive.accepted_length(draft, chosen)


@given(st.integers(0, 10), st.data())
def test_the_accepted_path_of_a_tree_equals_the_targets_tokens(size, data):
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(size)]
    draft = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    chosen = data.draw(st.lists(st.integers(0, 2), min_size=size + 1, max_size=size + 1))
    path = accepted_path(np.array(draft, np.uint32), np.array(parents, np.int32), np.array(chosen, np.uint32))
    assert path.tolist() == naive.accepted_path(draft, parents, chosen)


@given(st.lists(st.integers(0, 2), max_size=10), st.data())
def test_a_tree_without_branches_is_a_path(draft, data):
    chosen = data.draw(st.lists(st.integers(0, 2), min_size=len(draft) + 1, max_size=len(draft) + 1))
    tokens, target = np.array(draft, np.uint32), np.array(chosen, np.uint32)
    path = accepted_path(tokens, np.arange(-1, len(draft) - 1, dtype=np.int32), target)
    assert path.tolist() == list(range(accepted_length(tokens, target)))
