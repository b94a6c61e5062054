"""Pools of candidates, and the choice of the likeliest, against lists."""

from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.drafters.draft_pool import DraftPool, drafts_of, likeliest
from ssd.types import ROOT
from tests.replay import branches

WIDTH = 8
PROB = st.sampled_from([0.0, 0.25, 0.5, 1.0])


class Node(NamedTuple):
    """One candidate."""

    owner: int
    parent: int
    token: int
    accept_prob: float
    path_prob: float


@st.composite
def pools(draw):
    """A number of sequences, nodes by depth, each with a parent of the depth before, and a pool of the same nodes."""
    count = draw(st.integers(1, 4))
    nodes, frontier = [], [(owner, ROOT, 1.0) for owner in range(count)]
    pool = DraftPool()
    for _ in range(draw(st.integers(1, 4))):
        first = len(nodes)
        tokens, probs = np.full((len(frontier), WIDTH), -1), np.zeros((len(frontier), WIDTH), np.float32)
        for row, (owner, parent, path_prob) in enumerate(frontier):
            for rank in range(draw(st.integers(0, WIDTH))):
                tokens[row, rank], probs[row, rank] = draw(st.integers(0, 9)), draw(PROB)
                own = int(tokens[row, rank]), float(probs[row, rank])
                nodes.append(Node(owner, parent, *own, path_prob * own[-1]))
        owner, parent = (np.array([each[field] for each in frontier], np.int64) for field in (0, 1))
        pool.add(owner, parent, tokens, probs / 2, probs, owner * 10)
        kept = [index for index in range(first, len(nodes)) if draw(st.booleans())]
        frontier = [(nodes[index].owner, index, nodes[index].path_prob) for index in kept]
    return count, nodes, pool


def chosen_naively(nodes, owner, limit, first=0):
    """Indices of the likeliest candidates of a sequence from `first` on."""
    own = [index for index, node in enumerate(nodes) if node.owner == owner and index >= first]
    return sorted(own, key=lambda index: (-nodes[index].path_prob, index))[:limit]


@given(pools())
def test_columns_and_paths(made):
    _, nodes, pool = made
    columns = pool.nodes
    for field in Node._fields:
        assert getattr(columns, field).tolist() == [getattr(node, field) for node in nodes]
    assert columns.score.tolist() == [node.accept_prob / 2 for node in nodes]
    assert columns.q_row.tolist() == [node.owner * 10 for node in nodes]
    assert len(pool) == len(nodes)
    assert pool.path_to(ROOT).tolist() == []
    for index, path in enumerate(branches([node.token for node in nodes], [node.parent for node in nodes])):
        assert pool.path_to(index).tolist() == path


@given(pools(), st.lists(st.integers(0, 6), min_size=4, max_size=4))
def test_the_likeliest_candidates_become_drafts(made, limits):
    count, nodes, pool = made
    limits = limits[:count]
    chosen = [chosen_naively(nodes, owner, limit) for owner, limit in enumerate(limits)]
    owners, path_prob = (np.array([node[field] for node in nodes]) for field in (0, 4))
    found = likeliest(owners.astype(np.int64), path_prob.astype(np.float32), np.array(limits))
    assert found.tolist() == [index for own in chosen for index in own]
    first = len(nodes) // 2
    later = [chosen_naively(nodes, owner, limit, first) for owner, limit in enumerate(limits)]
    assert pool.likeliest(first, np.array(limits)).tolist() == [index for own in later for index in own]
    drafts = drafts_of(pool.nodes, np.array(limits), source=7)
    assert np.diff(drafts.batch.offsets).tolist() == [len(own) for own in chosen]
    assert drafts.batch.source.tolist() == [7] * len(found)
    for owner, own in enumerate(chosen):
        expected = [nodes[index] for index in own]
        assert drafts.batch.tokens_of(owner).tolist() == [node.token for node in expected]
        parents = [ROOT if node.parent == ROOT else own.index(node.parent) for node in expected]
        assert drafts.batch.parents_of(owner).tolist() == parents
        assert all(parent < place for place, parent in enumerate(parents))
    assert drafts.scores.tolist() == [nodes[index].accept_prob / 2 for index in found]
    assert drafts.batch.accept_prob.tolist() == [nodes[index].accept_prob for index in found]
