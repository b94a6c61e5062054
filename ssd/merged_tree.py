"""Merge the drafts of several drafters into one tree with calibrated acceptance probabilities.

A node that several drafters propose is one node of the tree. Its `accept_prob` is a mix of their probabilities in the
logistic domain, `sigmoid(w . logit(p))`, whose weights are learned online from the tokens that the target produced
(Mattern, "Mixing Strategies in Data Compression", 2012). The weights depend on which of the drafters propose the token,
which propose only others at the same position, and which propose nothing there.

Kernels work on the tree of one sequence: `tokens` and `parents` int64 [N], and `probs` float32 [N, S], the probability
of each of S drafters, `ABSENT` if it does not propose the node.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ssd.kernels.jit import FloatRows, FloatsOut, Int, Longs, Nothing, kernel
from ssd.types import ROOT

ABSENT = -1.0
CLIP = 0.001
"""Probabilities are limited to this distance from 0 and 1."""
RATE = 0.02
"""Learning rate of the mix, as in the corpus drafter's own mix times two, because there are fewer inputs."""
NOTHING, PROPOSED, OTHERS = 0, 1, 2
"""Proposals of a drafter at a position: nothing, the token, or only other tokens."""


class Tree(NamedTuple):
    """The merged tree of one sequence, with room for further nodes."""

    tokens: np.ndarray
    """int64 [room]."""
    parents: np.ndarray
    """int64 [room]; `ROOT` for a child of the context."""
    probs: np.ndarray
    """float32 [room, S]."""
    size: int

    @classmethod
    def empty(cls, room: int, sources: int) -> Tree:
        """Return a tree without nodes."""
        probs = np.full((room, sources), ABSENT, np.float32)
        return cls(np.empty(room, np.int64), np.empty(room, np.int64), probs, 0)

    def add(
        self, tokens: np.ndarray, parents: np.ndarray, accept_prob: np.ndarray, source: int, below: int = ROOT
    ) -> tuple[Tree, np.ndarray]:
        """Add a draft of `source` below the node `below`; nodes beyond the tree's room are dropped.

        tokens: integers [k]. parents: integers [k], within the draft, `ROOT` for a child of `below`. accept_prob:
        float32 [k]. Returns the tree and the node of each draft token, int64 [k], -1 for a dropped one.
        """
        nodes = np.empty(len(tokens), np.int64)
        size = _add(
            self.tokens, self.parents, self.probs, self.size, tokens.astype(np.int64), parents.astype(np.int64),
            accept_prob.astype(np.float32), source, below, nodes,
        )  # fmt: skip
        return self._replace(size=size), nodes


class Mix:
    """Weights of the mix of S drafters."""

    def __init__(self, sources: int) -> None:
        self.weights = np.zeros((3**sources, sources), np.float32)
        for number in range(3**sources):
            states = [number // 3**source % 3 for source in range(sources)]
            informed = sum(state != NOTHING for state in states)
            for source, state in enumerate(states):
                # Drafters that agree are each less than certain evidence, as their errors are correlated.
                self.weights[number, source] = 0.0 if state == NOTHING else informed**-0.5

    def evaluate(self, tree: Tree) -> Evaluation:
        """Return the probabilities of a tree's nodes."""
        size, sources = tree.size, self.weights.shape[1]
        found = Evaluation(
            np.zeros(size, np.float32), np.zeros(size, np.float32), np.zeros((size, sources), np.float32),
            np.zeros(size, np.int64),
        )  # fmt: skip
        _evaluate(tree.parents[:size], tree.probs[:size], self.weights, *found)
        return found

    def learn(self, tree: Tree, found: Evaluation, committed: np.ndarray) -> None:
        """Learn from the tokens that the target produced after the context, integers [m]."""
        size = tree.size
        _learn(
            tree.tokens[:size], tree.parents[:size], found.accept_prob, found.inputs, found.sets, self.weights,
            committed.astype(np.int64),
        )  # fmt: skip


class Evaluation(NamedTuple):
    """Probabilities of the N nodes of a tree."""

    accept_prob: np.ndarray
    """float32 [N]."""
    path_prob: np.ndarray
    """float32 [N]."""
    inputs: np.ndarray
    """float32 [N, S]: inputs of the mix."""
    sets: np.ndarray
    """int64 [N]: row of weights of each node."""


def likeliest_nodes(path_prob: np.ndarray, limit: int) -> np.ndarray:
    """Return at most `limit` nodes, the likeliest first, int64 [n]; parents precede their children."""
    return np.argsort(-path_prob, kind="stable")[:limit]


def best_path(parents: np.ndarray, path_prob: np.ndarray, limit: int) -> np.ndarray:
    """Return the path from the root with the largest expected number of accepted tokens, int64 [n], n <= limit."""
    gain, depth = np.zeros(len(parents)), np.zeros(len(parents), np.int64)
    for node, parent in enumerate(parents.tolist()):
        gain[node] = path_prob[node] + (gain[parent] if parent != ROOT else 0.0)
        depth[node] = 1 + (depth[parent] if parent != ROOT else 0)
    node = int(np.where(depth <= limit, gain, -1.0).argmax()) if limit and len(parents) else ROOT
    path = []
    while node != ROOT:
        path.append(node)
        node = int(parents[node])
    return np.array(path[::-1], np.int64)


@kernel(Longs, Longs, FloatRows, Int, Longs, Longs, FloatsOut, Int, Int, Longs, returns=Int)
def _add(tree_tokens, tree_parents, probs, size, tokens, parents, accept_prob, source, below, nodes):
    for index in range(len(tokens)):
        parent = below if parents[index] < 0 else nodes[parents[index]]
        nodes[index] = -1
        if parents[index] >= 0 and parent < 0:
            continue  # The parent was dropped.
        node = -1
        for other in range(parent + 1, size):
            if tree_parents[other] == parent and tree_tokens[other] == tokens[index]:
                node = other
                break
        if node < 0:
            if size == len(tree_tokens):
                continue
            node = size
            tree_tokens[node], tree_parents[node] = tokens[index], parent
            probs[node, :] = -1.0
            size += 1
        nodes[index] = node
        probs[node, source] = max(probs[node, source], accept_prob[index])
    return size


@kernel(Longs, FloatRows, FloatRows, FloatsOut, FloatsOut, FloatRows, Longs, returns=Nothing)
def _evaluate(parents, probs, weights, accept_prob, path_prob, inputs, sets):
    count, sources = probs.shape
    # Mass that a drafter gives to its own proposals at each position; entry 0 is the context's.
    mass = np.zeros((count + 1, sources), np.float32)
    proposes = np.zeros((count + 1, sources), np.bool_)
    for node in range(count):
        for source in range(sources):
            if probs[node, source] >= 0:
                mass[parents[node] + 1, source] += probs[node, source]
                proposes[parents[node] + 1, source] = True
    total = np.zeros(count + 1, np.float32)
    for node in range(count):
        place, number, sum_ = parents[node] + 1, 0, 0.0
        power = 1
        for source in range(sources):
            p = probs[node, source]
            state = 1 if p >= 0 else (2 if proposes[place, source] else 0)
            if state == 2:
                p = 0.5 * (1.0 - mass[place, source])
            if state:
                p = min(max(p, CLIP), 1.0 - CLIP)
                inputs[node, source] = np.log(p / (1.0 - p))
            number += power * state
            power *= 3
        for source in range(sources):
            sum_ += weights[number, source] * inputs[node, source]
        sets[node] = number
        accept_prob[node] = 1.0 / (1.0 + np.exp(-sum_))
        total[place] += accept_prob[node]
    for node in range(count):
        place = parents[node] + 1
        if total[place] > 1.0:
            accept_prob[node] /= total[place]
        path_prob[node] = accept_prob[node] * (path_prob[parents[node]] if parents[node] >= 0 else 1.0)


@kernel(Longs, Longs, FloatsOut, FloatRows, Longs, FloatRows, Longs, returns=Nothing)
def _learn(tokens, parents, accept_prob, inputs, sets, weights, committed):
    at = -1
    for token in committed:
        after = -2
        for node in range(at + 1, len(tokens)):
            if parents[node] != at:
                continue
            is_right = tokens[node] == token
            if is_right:
                after = node
            error = (1.0 if is_right else 0.0) - accept_prob[node]
            for source in range(inputs.shape[1]):
                weights[sets[node], source] += RATE * error * inputs[node, source]
        if after < 0:
            return
        at = after
