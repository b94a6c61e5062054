"""Drafts as hosts take them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.plugins.draft import NO_DRAFT, Draft, drafts_of
from ssd.types import DraftBatch, offsets_of


@st.composite
def drafts(draw):
    """Return a tree whose siblings have different tokens."""
    branches = []
    for _ in range(draw(st.integers(0, 8))):
        branch = draw(st.integers(-1, len(branches) - 1)), draw(st.integers(0, 3))
        if branch not in branches:
            branches.append(branch)
    return Draft([token for _, token in branches], [parent for parent, _ in branches])


def paths(draft, verified):
    """Return the path to each of the first `verified` tokens: the slow twin of `Draft.accepted`."""
    found = {-1: []}
    for node in range(min(verified, len(draft))):
        found[node] = [*found[draft.parents[node]], draft.tokens[node]]
    return list(found.values())


@given(drafts(), st.lists(st.integers(0, 3), max_size=6), st.integers(0, 9))
def test_the_accepted_tokens_are_the_longest_path(draft, text, verified):
    accepted = max(len(path) for path in paths(draft, verified) if path == text[: len(path)])
    assert draft.accepted(text, verified) == accepted


def test_drafts_end_at_the_vocabulary_and_where_a_host_wants_a_path():
    batch = DraftBatch(
        tokens=np.array([7, 1, 2, 3, 4, 9, 5], np.uint32),
        parents=np.array([-1, -1, 0, 0, 1, 3, 4], np.int32),
        accept_prob=np.ones(7, np.float32),
        source=np.zeros(7, np.uint8),
        offsets=offsets_of(np.array([1, 0, 6], np.uint32)),
    )
    first, rooms = Draft([7], [-1]), [1, 9, 9]
    assert drafts_of(batch, rooms, 9, is_tree=True) == [first, NO_DRAFT, Draft([1, 2, 3, 4], [-1, 0, 0, 1])]
    assert drafts_of(batch, rooms, 9, is_tree=False) == [first, NO_DRAFT, Draft([1, 2], [-1, 0])]
    assert drafts_of(batch, [0, 0, 1], 9, is_tree=False) == [NO_DRAFT, NO_DRAFT, Draft([1], [-1])]
