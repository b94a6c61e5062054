"""Draft trees that are right along one path, up to a point, with wrong branches anywhere."""

from __future__ import annotations

import numpy as np

from ssd.types import DraftBatch, offsets_of


def random_tree(rng, right, limit, vocab):
    """Tokens and parents of up to `limit` draft tokens; `right` is what the target produces."""
    tokens, parents, trunk = [], [], [-1]
    for node in range(rng.integers(0, limit + 1)):
        if len(trunk) <= len(right) and rng.random() < 0.6:
            tokens.append(int(right[len(trunk) - 1]))
            parents.append(trunk[-1])
            trunk.append(node)
        else:
            tokens.append(int(rng.integers(vocab)))
            parents.append(int(rng.integers(-1, node)))
    return tokens, parents


def batch_of_trees(trees):
    """A `DraftBatch` of (tokens, parents) pairs, one a sequence."""
    tokens = [token for tree, _ in trees for token in tree]
    return DraftBatch(
        tokens=np.array(tokens, np.uint32),
        parents=np.array([parent for _, parents in trees for parent in parents], np.int32),
        accept_prob=np.ones(len(tokens), np.float32),
        source=np.zeros(len(tokens), np.uint8),
        offsets=offsets_of(np.array([len(tree) for tree, _ in trees])),
    )
