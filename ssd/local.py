"""The index of one running request over its own prompt and output.

The same sorted positions as the corpus has, kept sorted token by token. To insert a position is to
search for the context before it, so one binary search serves both.
"""

from __future__ import annotations

import numpy as np

from ssd.jit import Int, Tokens, TokensOut, kernel
from ssd.match import Match, common_length, key_is_less, longest_match
from ssd.order import full_order

SORT_FROM = 128
"""Prompts of at least this many tokens are sorted at once rather than inserted one by one."""


class GrowingText:
    """A request's tokens so far, prompt and output."""

    def __init__(self, prompt: np.ndarray) -> None:
        self.size = 0
        self._tokens = np.empty(max(64, 2 * len(prompt)), np.uint32)
        self.prompt_length = len(prompt)
        self.extend(prompt)

    @property
    def tokens(self) -> np.ndarray:
        """uint32 [size]."""
        return self._tokens[: self.size]

    def extend(self, tokens: np.ndarray) -> None:
        """Append tokens, uint32 [n]."""
        self._tokens = grown(self._tokens, self.size, self.size + len(tokens))
        self._tokens[self.size : self.size + len(tokens)] = tokens
        self.size += len(tokens)


class LocalIndex(GrowingText):
    """A growing text with its positions in order.

    Keys are compared to `depth` tokens; of equal keys the earlier position comes first.
    """

    def __init__(self, prompt: np.ndarray, depth: int) -> None:
        self.depth = depth
        self._order = np.empty(0, np.uint32)
        self._ordered = 0
        super().__init__(prompt)

    def extend(self, tokens: np.ndarray) -> None:
        """Append tokens, uint32 [n], and bring their positions into order."""
        super().extend(tokens)
        # The newest position has no continuation yet, so it waits for the next token.
        usable = max(0, self.size - 1)
        if self._ordered == 0 and usable >= SORT_FROM:
            self._order = full_order(self.tokens)
        else:
            self._order = grown(self._order, self._ordered, usable)
            insert_positions(self._tokens, self._order, self._ordered, usable, self.depth)
        self._ordered = usable

    @property
    def order(self) -> np.ndarray:
        """Positions 1 to size - 1 in order, uint32."""
        return self._order[: self._ordered]

    def match(self) -> Match:
        """The longest earlier occurrence of the text's own end."""
        return Match(*longest_match(self._tokens, self._order, self._ordered, self._tokens, self.size, self.depth))


@kernel(Tokens, TokensOut, Int, Int, Int, returns=Int)
def insert_positions(text, order, size, until, depth):  # type: ignore[no-untyped-def]
    """Insert positions size + 1 to `until` of `text` into `order[:size]`, which holds 1 to `size`.

    Returns the new size.
    """
    while size < until:
        position = size + 1
        low, high = 0, size
        low_common, high_common = 0, 0
        while low < high:
            middle = (low + high) // 2
            common = common_length(text, order[middle], text, position, min(low_common, high_common), depth)
            if common == depth or key_is_less(text, order[middle], text, position, common, depth):
                low, low_common = middle + 1, common
            else:
                high, high_common = middle, common
        for index in range(size, low, -1):
            order[index] = order[index - 1]
        order[low] = position
        size += 1
    return size


def grown(array: np.ndarray, used: int, needed: int) -> np.ndarray:
    """`array` itself if it has room for `needed` entries, else a copy of its first `used` with twice the room."""
    if needed <= len(array):
        return array
    larger = np.empty(max(64, 2 * needed), array.dtype)
    larger[:used] = array[:used]
    return larger
