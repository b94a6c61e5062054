"""Random draft trees in which the first tokens of one path are right."""

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


class RandomTrees(NoDrafter):
    """Drafts random trees that are partly right."""

    limits = NO_LIMITS

    def __init__(self, submitted, answers, vocab, seed=4):
        self.texts = [[*request.prompt.tolist(), *answer] for request, answer in zip(submitted, answers, strict=True)]
        self.vocab = vocab
        self.lengths = {}
        self.rng = np.random.default_rng(seed)

    def start(self, sequence_id, prompt):
        self.lengths[sequence_id] = len(prompt)

    def draft(self, progress):
        trees = []
        for index, sequence_id in enumerate(progress.sequence_ids.tolist()):
            self.lengths[sequence_id] += int(progress.offsets[index + 1] - progress.offsets[index])
            right = self.texts[sequence_id][self.lengths[sequence_id] :]
            trees.append(self.tree(sequence_id, right, int(progress.max_draft[index])))
        return batch_of_trees(trees)

    def tree(self, sequence_id, right, limit):
        return random_tree(self.rng, right, limit, self.vocab)
