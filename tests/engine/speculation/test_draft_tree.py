import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.draft_tree import DraftTree, straight_length, straight_lengths
from ssd.types import NO_PATH, DraftBatch, Path, offsets_of


@st.composite
def parents_of_trees(draw):
    return [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, 12)))]


@given(parents_of_trees())
def test_tokens_attend_to_their_ancestors_and_themselves(parents):
    tree = DraftTree(np.array(parents, np.int32))
    for node in range(len(parents)):
        seen, at = set(), node
        while at >= 0:
            seen.add(at)
            at = parents[at]
        assert set(np.flatnonzero(tree.sees[node]).tolist()) == seen
        assert tree.depths[node] == len(seen)


@given(parents_of_trees())
def test_straight_length_ends_at_the_first_branch(parents):
    expected = 0
    while expected < len(parents) and parents[expected] == expected - 1:
        expected += 1
    assert straight_length(np.array(parents, np.int32)) == expected


def test_paths_are_straight():
    batch = DraftBatch.from_paths([Path(np.arange(3, dtype=np.uint32), np.ones(3, np.float32)), NO_PATH])
    assert straight_length(batch.parents_of(0)) == 3
    assert straight_length(batch.parents_of(1)) == 0


@given(st.lists(parents_of_trees(), max_size=5))
def test_straight_lengths_are_those_of_each_draft(drafts):
    parents = np.array([parent for draft in drafts for parent in draft], np.int32)
    expected = [straight_length(np.array(draft, np.int32)) for draft in drafts]
    assert straight_lengths(parents, offsets_of(np.array([*map(len, drafts)], np.uint32))).tolist() == expected
