"""Pools of candidates, and the choice of the likeliest, against lists."""

from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.drafters.draft_pool import Candidates, DraftPool, drafts_of, likeliest
from ssd.types import ROOT

PROB = st.sampled_from([0.0, 0.25, 0.5, 1.0])


class Node(NamedTuple):
    """One candidate."""

    owner: int
    parent: int
    token: int
    depth: int
    accept_prob: float
    path_prob: float


@st.composite
def pools(draw):
    """A number of sequences, and nodes by depth, each with a parent of the depth before."""
    count = draw(st.integers(1, 4))
    nodes, frontier = [], [(owner, ROOT, 1.0) for owner in range(count)]
    sizes = []
    for depth in range(1, draw(st.integers(1, 4)) + 1):
        first = len(nodes)
        for owner, parent, path_prob in frontier:
            for _ in range(draw(st.integers(0, 3))):
                accept_prob = draw(PROB)
                token = draw(st.integers(0, 9))
                nodes.append(Node(owner, parent, token, depth, accept_prob, path_prob * accept_prob))
        sizes.append(len(nodes) - first)
        kept = [index for index in range(first, len(nodes)) if draw(st.booleans())]
        frontier = [(nodes[index].owner, index, nodes[index].path_prob) for index in kept]
    return count, nodes, sizes


def pool_of(nodes, sizes):
    pool, first = DraftPool(), 0
    for size in sizes:
        part = nodes[first : first + size]
        columns = [
            np.array([node[field] for node in part], np.float32 if field > 3 else np.int64) for field in range(6)
        ]
        pool.add(Candidates(*columns, score=columns[4], q_row=columns[1]))
        first += size
    return pool


def chosen_naively(nodes, owner, limit):
    """Indices of the likeliest candidates of a sequence."""
    own = [index for index, node in enumerate(nodes) if node.owner == owner]
    return sorted(own, key=lambda index: (-nodes[index].path_prob, index))[:limit]


@given(pools())
def test_paths(made):
    _, nodes, sizes = made
    pool = pool_of(nodes, sizes)
    assert len(pool) == len(nodes)
    assert pool.path_to(ROOT).tolist() == []
    paths = []
    for index, node in enumerate(nodes):
        paths.append([*(paths[node.parent] if node.parent != ROOT else []), node.token])
        assert pool.path_to(index).tolist() == paths[-1]
        assert pool.parent(index) == node.parent


@given(pools(), st.lists(st.integers(0, 6), min_size=4, max_size=4))
def test_the_likeliest_candidates_become_drafts(made, limits):
    count, nodes, sizes = made
    limits = limits[:count]
    chosen = [chosen_naively(nodes, owner, limit) for owner, limit in enumerate(limits)]
    owners, path_prob = (np.array([node[field] for node in nodes]) for field in (0, 5))
    found = likeliest(owners.astype(np.int64), path_prob.astype(np.float32), np.array(limits))
    assert found.tolist() == [index for own in chosen for index in own]
    drafts = drafts_of(pool_of(nodes, sizes), np.array(limits), source=7)
    assert np.diff(drafts.batch.offsets).tolist() == [len(own) for own in chosen]
    assert drafts.batch.source.tolist() == [7] * len(found)
    for owner, own in enumerate(chosen):
        expected = [nodes[index] for index in own]
        assert drafts.batch.tokens_of(owner).tolist() == [node.token for node in expected]
        parents = [ROOT if node.parent == ROOT else own.index(node.parent) for node in expected]
        assert drafts.batch.parents_of(owner).tolist() == parents
        assert all(parent < place for place, parent in enumerate(parents))
    assert drafts.nodes.parent.tolist() == drafts.batch.parents.tolist()
    assert drafts.nodes.depth.tolist() == [nodes[index].depth for index in found]
    assert drafts.batch.accept_prob.tolist() == [nodes[index].accept_prob for index in found]
