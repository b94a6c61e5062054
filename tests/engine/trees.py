"""Drafters of paths and trees that are partly right."""

from __future__ import annotations

import numpy as np

from ssd.baselines.none import NoDrafter
from ssd.types import NO_LIMITS, DraftBatch, offsets_of


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
    """A `DraftBatch` of (tokens, parents) pairs, one per sequence."""
    tokens = [token for tree, _ in trees for token in tree]
    return DraftBatch(
        tokens=np.array(tokens, np.uint32),
        parents=np.array([parent for _, parents in trees for parent in parents], np.int32),
        accept_prob=np.ones(len(tokens), np.float32),
        source=np.zeros(len(tokens), np.uint8),
        offsets=offsets_of(np.array([len(tree) for tree, _ in trees])),
    )


class Following(NoDrafter):
    """Knows the length of each sequence, and drafts what `tree` returns."""

    limits = NO_LIMITS

    def __init__(self):
        self.lengths = {}
        """Number of committed tokens by sequence id."""

    def start(self, sequence_id, prompt):
        self.lengths[sequence_id] = len(prompt)

    def draft(self, progress):
        trees = []
        ids, most = progress.sequence_ids.tolist(), progress.max_draft.tolist()
        for sequence_id, count, limit in zip(ids, np.diff(progress.offsets).tolist(), most, strict=True):
            self.lengths[sequence_id] += count
            trees.append(self.tree(sequence_id, self.lengths[sequence_id], limit))
        return batch_of_trees(trees)

    def tree(self, sequence_id, length, limit):
        """Return tokens and parents of at most `limit` draft tokens after `length` committed ones."""
        raise NotImplementedError


class ScriptedDrafter(Following):
    """Drafts the tokens that a function of (sequence id, committed length) returns, as a path."""

    def __init__(self, script):
        super().__init__()
        self.script = script

    def tree(self, sequence_id, length, limit):
        tokens = list(self.script(sequence_id, length))[:limit]
        return tokens, range(-1, len(tokens) - 1)


class RandomTrees(Following):
    """Drafts random trees in which the first tokens of one path are right."""

    def __init__(self, submitted, answers, vocab, seed=4):
        super().__init__()
        self.texts = [[*request.prompt.tolist(), *answer] for request, answer in zip(submitted, answers, strict=True)]
        self.vocab = vocab
        self.rng = np.random.default_rng(seed)

    def tree(self, sequence_id, length, limit):
        return random_tree(self.rng, self.texts[sequence_id][length:], limit, self.vocab)


class RandomPaths(RandomTrees):
    """Drafts paths of any length that are right up to a random position."""

    def tree(self, sequence_id, length, limit):
        right = self.texts[sequence_id][length:][: self.rng.integers(0, 7)]
        tokens = [*right, *self.rng.integers(0, self.vocab, self.rng.integers(0, 3)).tolist()][:limit]
        return tokens, range(-1, len(tokens) - 1)
