"""A draft as hosts take it: plain ints, within the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ssd.types import ROOT, DraftBatch


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft tokens of one request, parents before their children."""

    tokens: list[int]
    parents: list[int]
    """Index of each token's parent in `tokens`; `ROOT` for a token that follows the text."""

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def cut(self, length: int) -> Draft:
        """Return the first `length` tokens, which are a draft too."""
        return Draft(self.tokens[:length], self.parents[:length])

    def accepted(self, text: Sequence[int], verified: int) -> int:
        """Return how many tokens at the start of `text` are a path among the first `verified` tokens."""
        length, at, tokens, parents = 0, ROOT, self.tokens, self.parents
        for node in range(min(verified, len(tokens))):
            if length == len(text):
                break
            if parents[node] == at and tokens[node] == text[length]:
                length, at = length + 1, node
        return length


NO_DRAFT = Draft([], [])


def drafts_of(batch: DraftBatch, rooms: Sequence[int], vocab_size: int, *, is_tree: bool) -> list[Draft]:
    """Return the draft of each sequence of a batch, of at most `rooms` tokens.

    It ends before the first token that is not in the vocabulary or, unless is_tree, that does not continue a path.
    """
    tokens, parents, offsets = batch.tokens.tolist(), batch.parents.tolist(), batch.offsets.tolist()
    drafts = []
    for (start, end), room in zip(pairwise(offsets), rooms, strict=True):
        if start == end:
            drafts.append(NO_DRAFT)
            continue
        draft = Draft(tokens[start : min(end, start + room)], parents[start : min(end, start + room)])
        drafts.append(draft.cut(_valid_length(draft, vocab_size, is_tree)))
    return drafts


def _valid_length(draft: Draft, vocab_size: int, is_tree: bool) -> int:
    """Return how many tokens at the start of a draft a host can verify."""
    for at, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if token >= vocab_size or not (is_tree or parent == at + ROOT):
            return at
    return len(draft.tokens)
