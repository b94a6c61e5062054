"""The merged tree and its mix against an obvious implementation on lists and dictionaries."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.merged_tree import ABSENT, CLIP, RATE, Mix, Tree, best_path, likeliest_nodes
from ssd.types import ROOT

SOURCES = 3
PROB = st.floats(0, 1, width=32)


@st.composite
def drafts(draw):
    """Lists of (source, place of the node below which it is added, tokens, parents, probabilities)."""
    found = []
    for _ in range(draw(st.integers(0, 5))):
        size = draw(st.integers(0, 6))
        found.append(
            (
                draw(st.integers(0, SOURCES - 1)),
                draw(st.integers(0, 5)),
                [draw(st.integers(0, 3)) for _ in range(size)],
                [draw(st.integers(ROOT, index - 1)) for index in range(size)],
                [draw(PROB) for _ in range(size)],
            )
        )
    return found


class Naive:
    """A tree as a list of nodes, each with its parent, token and probabilities by source."""

    def __init__(self, room):
        self.room, self.nodes = room, []

    def add(self, source, below, tokens, parents, probs):
        mine = []
        for token, parent, prob in zip(tokens, parents, probs, strict=True):
            above = below if parent == ROOT else mine[parent]
            mine.append(None if above is None else self.find_or_add(above, token))
            if mine[-1] is not None:
                by_source = self.nodes[mine[-1]][2]
                by_source[source] = max(by_source.get(source, 0.0), prob)
        return mine

    def find_or_add(self, parent, token):
        for index, node in enumerate(self.nodes):
            if node[:2] == (parent, token):
                return index
        if len(self.nodes) == self.room:
            return None
        self.nodes.append((parent, token, {}))
        return len(self.nodes) - 1

    def children(self, parent):
        return [index for index, node in enumerate(self.nodes) if node[0] == parent]

    def inputs(self, index):
        """State and logit of the probability of each source."""
        siblings = self.children(self.nodes[index][0])
        for source in range(SOURCES):
            masses = [self.nodes[each][2][source] for each in siblings if source in self.nodes[each][2]]
            if source in self.nodes[index][2]:
                yield 1, logit(self.nodes[index][2][source])
            elif masses:
                yield 2, logit(0.5 * (1 - sum(masses)))
            else:
                yield 0, 0.0

    def evaluate(self, weights):
        raw = []
        for index in range(len(self.nodes)):
            states, inputs = zip(*self.inputs(index), strict=True)
            mixed = sum(weight * each for weight, each in zip(weights[states], inputs, strict=True))
            raw.append((1 / (1 + math.exp(-mixed)), states, inputs))
        accept, path = [], []
        for index, (parent, _, _) in enumerate(self.nodes):
            accept.append(raw[index][0] / max(1.0, sum(raw[each][0] for each in self.children(parent))))
            path.append(accept[-1] * (1.0 if parent == ROOT else path[parent]))
        return accept, path, raw

    def learn(self, weights, committed):
        accept, _, raw = self.evaluate(weights)
        at = ROOT
        for token in committed:
            after = None
            for child in self.children(at):
                is_right = self.nodes[child][1] == token
                after = child if is_right else after
                _, states, inputs = raw[child]
                for source in range(SOURCES):
                    weights[states][source] += RATE * (is_right - accept[child]) * inputs[source]
            if after is None:
                return
            at = after


def logit(p):
    p = min(max(p, CLIP), 1 - CLIP)
    return math.log(p / (1 - p))


def weights_of(mix):
    """Weights by the states of the sources."""
    states = itertools.product(range(3), repeat=SOURCES)
    return {each: mix.weights[sum(state * 3**at for at, state in enumerate(each))].tolist() for each in states}


def random_mix(seed):
    mix = Mix(SOURCES)
    mix.weights += np.random.default_rng(seed).normal(0, 0.5, mix.weights.shape).astype(np.float32)
    return mix


def grow(added, room):
    """Add the drafts to both trees, and compare the nodes that they return."""
    tree, naive = Tree.empty(room, SOURCES), Naive(room)
    for source, place, tokens, parents, probs in added:
        below = place if place < tree.size else ROOT
        columns = np.array(tokens, np.uint32), np.array(parents, np.int32), np.array(probs, np.float32)
        tree, nodes = tree.add(*columns, source, below)
        expected = naive.add(source, below, tokens, parents, np.float32(probs).tolist())
        assert nodes.tolist() == [-1 if node is None else node for node in expected]
    return tree, naive


@given(drafts(), st.integers(1, 16))
def test_drafts_are_merged(added, room):
    tree, naive = grow(added, room)
    assert tree.size == len(naive.nodes)
    for index, (parent, token, probs) in enumerate(naive.nodes):
        assert (tree.parents[index], tree.tokens[index]) == (parent, token)
        assert tree.probs[index].tolist() == [probs.get(source, ABSENT) for source in range(SOURCES)]


@given(drafts(), st.integers(0, 100))
def test_probabilities(added, seed):
    tree, naive = grow(added, 16)
    mix = random_mix(seed)
    found = mix.evaluate(tree)
    accept, path, _ = naive.evaluate(weights_of(mix))
    np.testing.assert_allclose(found.accept_prob, accept, rtol=2e-3)
    np.testing.assert_allclose(found.path_prob, path, rtol=1e-2)
    # Parents precede their children even if they are equally likely.
    order = likeliest_nodes(found.path_prob, 16).tolist()
    assert all(naive.nodes[node][0] in [ROOT, *order[:place]] for place, node in enumerate(order))


@given(drafts(), st.lists(st.integers(0, 3), max_size=4), st.integers(0, 100))
def test_weights_learn_from_committed_tokens(added, committed, seed):
    tree, naive = grow(added, 16)
    mix = random_mix(seed)
    weights = weights_of(mix)
    mix.learn(tree, mix.evaluate(tree), np.array(committed, np.uint32))
    naive.learn(weights, committed)
    found = weights_of(mix)
    for states, expected in weights.items():
        np.testing.assert_allclose(found[states], expected, rtol=1e-3, atol=1e-4)


def test_the_probability_of_a_single_source_is_kept():
    tree, _ = Tree.empty(8, SOURCES).add(np.array([1, 2]), np.array([ROOT, 0]), np.array([0.3, 0.9]), 1)
    found = Mix(SOURCES).evaluate(tree)
    assert found.accept_prob.tolist() == pytest.approx([0.3, 0.9])
    assert found.path_prob.tolist() == pytest.approx([0.3, 0.27])


@st.composite
def weighted_trees(draw):
    """Parents and path probabilities, which fall along each path."""
    size = draw(st.integers(0, 8))
    parents = [draw(st.integers(ROOT, index - 1)) for index in range(size)]
    path_prob = []
    for parent in parents:
        path_prob.append(draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])) * (1.0 if parent == ROOT else path_prob[parent]))
    return np.array(parents, np.int64), np.array(path_prob, np.float32)


@given(weighted_trees(), st.integers(0, 5))
def test_best_path(tree, limit):
    parents, path_prob = tree
    paths = [[]]
    for node, parent in enumerate(parents.tolist()):
        paths.append([*(paths[1 + parent] if parent != ROOT else []), node])
    found = best_path(parents, path_prob, limit).tolist()
    assert found in paths
    assert len(found) <= limit
    most = max(path_prob[path].sum() for path in paths if len(path) <= limit)
    assert path_prob[found].sum() == most


@given(weighted_trees(), st.integers(0, 10))
def test_likeliest_nodes(tree, limit):
    parents, path_prob = tree
    found = likeliest_nodes(path_prob, limit).tolist()
    assert found == sorted(range(len(parents)), key=lambda node: (-path_prob[node], node))[:limit]
    assert all(parents[node] in [ROOT, *found[:place]] for place, node in enumerate(found))
