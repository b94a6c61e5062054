"""The plain scheme of the article that this project began from, kept as the baseline to measure against.

TitanML, "The Next Leap in Speculative Decoding: Inside TitanML's Takeoff Engine": at an interval build the
suffix array of a circular buffer of finished requests; look for the last 10 tokens, then 9, ... down to 1;
among the matches count the whole continuations, cut to the draft's length, and take the most frequent.
"""

from __future__ import annotations

import numpy as np
from numba import types

from ssd.config import DrafterConfig
from ssd.corpus import View
from ssd.draft import NO_PATH, Path
from ssd.jit import Int, Tokens, TokensOut, inline, kernel
from ssd.local import GrowingText
from ssd.match import sample_positions
from ssd.order import forward_order
from ssd.ring import SEPARATOR

LONGEST_PATTERN = 10
"""Tokens looked for first, as in the article."""


class ArticlePolicy:
    """Decreasing match lengths over a forward suffix array; the most frequent whole continuation."""

    def __init__(self, config: DrafterConfig) -> None:
        self._config = config

    def sort(self, text: np.ndarray) -> np.ndarray:
        """Positions of a corpus text as this policy searches them, uint32."""
        return forward_order(text)

    def open(self, prompt: np.ndarray) -> GrowingText:
        """What is kept for a running request: its tokens, which this scheme does not draft from."""
        return GrowingText(prompt)

    def draft(self, view: View, local: GrowingText, limit: int) -> Path:
        """A path of at most `limit` tokens.

        The scheme has no odds: the first token carries its path's share of the matches.
        """
        left, right, length = longest_pattern(view.text, view.order, local.tokens, LONGEST_PATTERN)
        positions = np.empty(self._config.samples, np.uint32)
        count = sample_positions(view.order, left, right, len(positions), positions)
        if count == 0:
            return NO_PATH
        start, size, votes = commonest_continuation(view.text, positions, count, length, limit)
        odds = np.ones(size, np.float32)
        odds[:1] = votes / count
        return Path(view.text[start : start + size], odds, match_length=length)


@inline
def _bound(text, order, context, first, after_equal):  # type: ignore[no-untyped-def]
    """The first place in `order` whose text is not less than `context[first:]`, or not even equal to it."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        at, index = order[middle], first
        while index < len(context) and at < len(text) and text[at] == context[index]:
            at += 1
            index += 1
        is_prefix = index == len(context)
        if after_equal if is_prefix else (at == len(text) or text[at] < context[index]):
            low = middle + 1
        else:
            high = middle
    return low


@kernel(Tokens, Tokens, Tokens, Int, returns=types.UniTuple(Int, 3))
def longest_pattern(text, order, context, longest):  # type: ignore[no-untyped-def]
    """Where the last `longest` tokens of `context` occur, or as many fewer as it takes.

    text, order (its suffix array), context: uint32. Returns (left, right, length): `order[left:right]` begin
    with the last `length` tokens; an empty range and length 0 if not even the last token occurs.
    """
    for length in range(min(longest, len(context)), 0, -1):
        first = len(context) - length
        left = _bound(text, order, context, first, False)
        right = _bound(text, order, context, first, True)
        if left < right:
            return left, right, length
    return 0, 0, 0


@inline
def _continues_alike(text, left, right, size, limit):  # type: ignore[no-untyped-def]
    """Whether the continuation from `left` is the one of `size` tokens from `right`."""
    for offset in range(size):
        if left + offset >= len(text) or text[left + offset] != text[right + offset]:
            return False
    return size == limit or left + size >= len(text) or text[left + size] == SEPARATOR


@kernel(Tokens, TokensOut, Int, Int, Int, returns=types.UniTuple(Int, 3))
def commonest_continuation(text, positions, count, length, limit):  # type: ignore[no-untyped-def]
    """The continuation that most of `positions[:count]` share; of equally common ones that with the latest position.

    A continuation begins `length` tokens on, and ends after `limit` tokens, at a separator or at the end of the
    text. `positions` must be in suffix order, so that equal continuations are neighbours. Returns (start, size, votes).
    """
    best_start, best_size, best_votes, best_newest = 0, 0, 0, -1
    index = 0
    while index < count:
        start = positions[index] + length
        size = 0
        while size < limit and start + size < len(text) and text[start + size] != SEPARATOR:
            size += 1
        votes, newest = 0, -1
        while index < count and _continues_alike(text, positions[index] + length, start, size, limit):
            newest = max(newest, positions[index])
            votes += 1
            index += 1
        if votes > best_votes or (votes == best_votes and newest > best_newest):
            best_start, best_size, best_votes, best_newest = start, size, votes, newest
    return best_start, best_size, best_votes
