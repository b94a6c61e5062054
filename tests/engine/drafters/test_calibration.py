"""The table of acceptance rates against one on dictionaries, and what a drafter's calibration learns from results."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.drafters.drafts import DETERMINISTIC, Drafts
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.result import StepResult
from engine.scheduling.sequence import Sequence
from engine.speculation.draft_tree import depths_of
from ssd.acceptance import DEPTHS, EDGES, MAX_WEIGHT, PRIOR_WEIGHT, AcceptanceTable
from ssd.types import ROOT, offsets_of
from tests.engine.steps import Entry, plan_of
from tests.engine.trees import batch_of_trees
from tests.strategies import array

SCORES = st.one_of(st.floats(0, 1, width=32), st.sampled_from(EDGES.astype(np.float32).tolist()))
OBSERVED = st.lists(st.tuples(st.booleans(), SCORES, st.integers(1, DEPTHS + 2), st.booleans()), max_size=30)


class Naive:
    """Rate and weight by kind of request, depth and interval."""

    def __init__(self):
        self.entries = {}

    def entry(self, is_sampled, score, depth):
        bounds = [0.0, *EDGES.tolist(), 1.0]
        interval = next(index for index, end in enumerate([*EDGES.tolist(), 2.0]) if score < end)
        middle = (bounds[interval] + bounds[interval + 1]) / 2
        return self.entries.setdefault((is_sampled, min(depth, DEPTHS), interval), [middle, PRIOR_WEIGHT])

    def observe(self, is_sampled, score, depth, accepted):
        entry = self.entry(is_sampled, score, depth)
        entry[0] = (entry[0] * entry[1] + accepted) / (entry[1] + 1)
        entry[1] = min(entry[1] + 1, MAX_WEIGHT)


def assert_same(table, naive, submitted):
    is_sampled, scores, depths = (np.array([row[field] for row in submitted]) for field in range(3))
    expected = [naive.entry(*row)[0] for row in submitted]
    np.testing.assert_allclose(table.accept_prob(is_sampled, scores.astype(np.float32), depths), expected, rtol=1e-5)


@given(OBSERVED, st.lists(st.tuples(st.booleans(), SCORES, st.integers(1, DEPTHS + 2)), min_size=1, max_size=6))
def test_rates(observed, submitted):
    table, naive = AcceptanceTable(), Naive()
    for is_sampled, *rows in observed:
        table.observe(is_sampled, *(np.array([row]) for row in rows))
        naive.observe(is_sampled, *rows)
    assert_same(table, naive, [*submitted, *(row[:3] for row in observed)])


def test_rates_follow_a_change():
    """After 250 observations the weight of older ones falls, so that 500 more move a rate by 1 - 1 / e ** 2."""
    table = AcceptanceTable()
    accepted = np.array([True] * 300 + [False] * 500)
    table.observe(True, np.full(800, 0.5), np.full(800, 1), accepted)
    for is_sampled, depth, expected in ((True, 1, np.exp(-2)), (True, 2, 0.55), (False, 1, 0.55)):
        found = table.accept_prob(np.array([is_sampled]), np.array([0.5]), depth)[0]
        assert found == pytest.approx(expected, abs=0.02)


@st.composite
def drafts(draw):
    """Parents and scores of a draft, and its accepted nodes."""
    size = draw(st.integers(1, 8))
    parents = [draw(st.integers(ROOT, index - 1)) for index in range(size)]
    kept = []
    while children := [node for node, parent in enumerate(parents) if parent == (kept[-1] if kept else ROOT)]:
        choice = draw(st.sampled_from([None, *children]))
        if choice is None:
            break
        kept.append(choice)
    return parents, [draw(SCORES) for _ in parents], kept


@given(st.lists(st.tuples(drafts(), st.booleans()), min_size=1, max_size=3), st.booleans())
def test_tokens_whose_parents_were_accepted_are_learned_from(drafted, has_q):
    """If one of a draft's tokens was sampled from q, the draft was verified by rejection, and nothing is learned."""
    submitted = [(np.zeros(len(parents), int), parents) for (parents, *_), _ in drafted]
    scores = np.concatenate([scores for (_, scores, _), _ in drafted]).astype(np.float32)
    table, naive, reached = AcceptanceTable(), Naive(), []
    values, paths = np.zeros((len(drafted), 12), np.int32), np.zeros((len(drafted), 10), np.int64)
    first_row = np.full(len(scores), DETERMINISTIC, np.int32)
    for index, ((parents, own, kept), is_sampled) in enumerate(drafted):
        values[index, :2], paths[index, : len(kept)], depths = (1 + len(kept), len(parents)), kept, []
        reached.append(0)
        for node, parent in enumerate(parents):
            depths.append(1 + (depths[parent] if parent != ROOT else 0))
            if (parent == ROOT or parent in kept) and not (has_q and index == 0):
                naive.observe(is_sampled, own[node], depths[node], node in kept)
                reached[-1] = max(reached[-1], depths[node])
    first_row[0] = 0
    drafts = Drafts(batch_of_trees(submitted), q_rows=first_row if has_q else None, scores=scores)
    requests = [Request(array([1]), SamplingParams(temperature=float(is_sampled))) for _, is_sampled in drafted]
    parts = [Entry(Sequence(0, request, 99), 0, 1) for request in requests]
    result = StepResult(replace(plan_of(parts), drafts=drafts), values, paths)
    result.lengths[:] = values[:, 0]
    assert result.teach(table).tolist() == reached
    for (parents, own, _), is_sampled in drafted:
        depths = depths_of(np.array(parents, np.int32), offsets_of(np.array([len(parents)])))
        assert_same(table, naive, [(is_sampled, *row) for row in zip(own, depths.tolist(), strict=True)])
