"""Shapes of draft trees, and the kernels that accept drafts and find paths of committed tokens, against naive twins."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.draft_tree import DraftTree, accept_exactly, find_paths, straight_length, straight_lengths
from ssd.types import offsets_of
from tests import naive
from tests.engine.steps import accepting
from tests.engine.trees import batch_of_trees

WIDTH = 12


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


@given(st.lists(parents_of_trees(), max_size=5))
def test_straight_lengths_end_at_the_first_branch(drafts):
    expected = [next((at for at, parent in enumerate(draft) if parent != at - 1), len(draft)) for draft in drafts]
    assert [straight_length(np.array(draft, np.int32)) for draft in drafts] == expected
    parents = np.array([parent for draft in drafts for parent in draft], np.int32)
    assert straight_lengths(parents, offsets_of(np.array([*map(len, drafts)], np.uint32))).tolist() == expected


@st.composite
def drafts(draw):
    """Trees of few different tokens, so that they are often right, and the numbers of verified tokens."""
    trees = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(0, 10))
        parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
        trees.append((draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)), parents))
    return batch_of_trees(trees), np.array([draw(st.integers(0, len(tokens))) for tokens, _ in trees])


@given(drafts(), st.data())
def test_drafts_are_accepted_as_by_the_naive_twin(drafted, data):
    batch, lengths = drafted
    indices = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=len(batch), max_size=len(batch))))
    bounds = np.append(0, np.cumsum(1 + lengths[indices]))
    size = int(bounds[-1])
    targets = np.array(data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)), np.int64)
    results = []
    for accept in (accept_exactly, accepting(lambda *draft: naive.accepted_path(*map(list, draft)))):
        results.append((np.zeros((len(batch), 2 + WIDTH), np.int32), np.zeros((len(batch), WIDTH), np.int64)))
        accept(batch.tokens, batch.parents, batch.offsets, lengths, indices, targets, bounds, *results[-1])
    assert [array.tolist() for array in results[0]] == [array.tolist() for array in results[1]]


@given(drafts(), st.data())
def test_paths_of_committed_tokens_are_those_of_the_naive_twin(drafted, data):
    batch, _ = drafted
    row = st.lists(st.integers(0, 2), min_size=WIDTH, max_size=WIDTH)
    committed = np.array([data.draw(row) for _ in batch.offsets])
    lengths = np.array([data.draw(st.integers(0, WIDTH)) for _ in range(len(batch))])
    verified, accepted, paths = np.empty(len(batch), int), np.empty(len(batch), int), np.zeros((len(batch), WIDTH), int)
    arrays = batch.tokens, batch.parents, batch.offsets, committed.astype(np.uint32), lengths, np.arange(len(batch))
    find_paths(*arrays, verified, accepted, paths)
    for index, length in enumerate(lengths.tolist()):
        tokens, parents = batch.tokens_of(index).tolist(), batch.parents_of(index).tolist()
        depths = []
        for parent in parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        known = next((node for node, depth in enumerate(depths) if depth > length), len(tokens))
        # After a node at some depth, the committed token at this depth follows.
        after = [committed[index, depth] if depth < length else -1 for depth in (0, *depths)]
        path = naive.accepted_path(tokens[:known], parents[:known], after)
        assert (verified[index], paths[index, : accepted[index]].tolist()) == (known, path)
