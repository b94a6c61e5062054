"""A draft as hosts take it: plain ints, within the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ssd.types import ROOT, DraftBatch


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft tokens of one request, parents before their children."""

    tokens: list[int]
    parents: list[int]
    """Index of each token's parent in `tokens`; `ROOT` for a token that follows the text."""

    @classmethod
    def from_batch(cls, batch: DraftBatch, index: int, vocab_size: int, *, is_tree: bool) -> Draft:
        """Return the first tokens of a sequence's draft that are in the vocabulary and, unless is_tree, a path."""
        tokens, parents = batch.tokens_of(index).tolist(), batch.parents_of(index).tolist()
        length = 0
        while length < len(tokens) and tokens[length] < vocab_size and (is_tree or parents[length] == length + ROOT):
            length += 1
        return cls(tokens[:length], parents[:length])

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def cut(self, length: int) -> Draft:
        """Return the first `length` tokens, which are a draft too."""
        return Draft(self.tokens[:length], self.parents[:length])

    def accepted(self, text: Sequence[int], verified: int) -> int:
        """Return how many tokens at the start of `text` are a path among the first `verified` tokens."""
        length, at = 0, ROOT
        branches = zip(self.parents[:verified], self.tokens[:verified], strict=True)
        children = {branch: node for node, branch in enumerate(branches)}
        for token in text:
            at = children.get((at, token), ROOT)
            if at == ROOT:
                break
            length += 1
        return length


NO_DRAFT = Draft([], [])
