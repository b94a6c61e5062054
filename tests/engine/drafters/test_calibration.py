"""The table of acceptance rates against one on dictionaries, and what a drafter's calibration learns from results."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.drafters.calibration import DEPTHS, EDGES, MAX_WEIGHT, PRIOR_WEIGHT, AcceptanceTable, reached_tokens
from ssd.types import ROOT

SCORES = st.one_of(st.floats(0, 1), st.sampled_from(EDGES.tolist()))
BATCHES = st.lists(st.lists(st.tuples(SCORES, st.integers(1, DEPTHS + 2), st.booleans()), max_size=6), max_size=6)


class Naive:
    """Rate and weight by depth and interval."""

    def __init__(self):
        self.entries = {}

    def entry(self, score, depth):
        bounds = [0.0, *EDGES.tolist(), 1.0]
        interval = next(index for index, end in enumerate([*EDGES.tolist(), 2.0]) if score < end)
        middle = (bounds[interval] + bounds[interval + 1]) / 2
        return self.entries.setdefault((min(depth, DEPTHS), interval), [middle, PRIOR_WEIGHT])

    def observe(self, batch):
        """All tokens of a batch count before the weight is limited."""
        touched = []
        for score, depth, accepted in batch:
            entry = self.entry(score, depth)
            entry[0] = (entry[0] * entry[1] + accepted) / (entry[1] + 1)
            entry[1] += 1
            touched.append(entry)
        for entry in touched:
            entry[1] = min(entry[1], MAX_WEIGHT)


@given(BATCHES, st.lists(st.tuples(SCORES, st.integers(1, DEPTHS + 2)), min_size=1, max_size=6))
def test_rates(batches, asked):
    table, naive = AcceptanceTable(), Naive()
    for batch in batches:
        scores, depths, accepted = (np.array([row[field] for row in batch]) for field in range(3))
        table.observe(scores, depths.astype(np.int64), accepted.astype(np.bool_))
        naive.observe(batch)
    scores, depths = (np.array([row[field] for row in asked]) for field in range(2))
    expected = [naive.entry(score, depth)[0] for score, depth in asked]
    np.testing.assert_allclose(table.accept_prob(scores, depths), expected, rtol=1e-6)


def test_rates_follow_a_change():
    """After 250 observations the weight of older ones falls, so that 500 more move a rate by 1 - 1 / e ** 2."""
    table = AcceptanceTable()
    for accepted in [True] * 300 + [False] * 500:
        table.observe(np.array([0.5]), np.array([1]), np.array([accepted]))
    assert table.accept_prob(np.array([0.5]), np.array([1]))[0] == pytest.approx(np.exp(-2), abs=0.02)
    assert table.accept_prob(np.array([0.5]), np.array([2]))[0] == pytest.approx(0.55)


@st.composite
def trees(draw):
    size = draw(st.integers(1, 8))
    parents = [draw(st.integers(ROOT, index - 1)) for index in range(size)]
    kept = []
    while children := [node for node, parent in enumerate(parents) if parent == (kept[-1] if kept else ROOT)]:
        choice = draw(st.sampled_from([None, *children]))
        if choice is None:
            break
        kept.append(choice)
    return parents, kept


@given(trees())
def test_tokens_whose_parents_were_accepted(tree):
    parents, kept = tree
    found = reached_tokens(np.array(parents, np.int32), np.array(kept, np.int64))
    assert found.tolist() == [parent == ROOT or parent in kept for parent in parents]
