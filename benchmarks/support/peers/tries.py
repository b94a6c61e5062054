"""Drafters over a trie of n-grams: SGLang's n-gram cache, and a REST-like datastore. Both are re-implemented."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence

import numpy as np

from benchmarks.support.peers.text_drafter import Answer, TextDrafter

SGLANG_DEPTH = 18
SGLANG_LEAST_BREADTH, SGLANG_MOST_BREADTH = 1, 10
"""SGLang's defaults (`speculative_ngram_*`)."""

REST_LONGEST, REST_SHORTEST = 16, 2
REST_CONTINUATION = 10
"""Context tokens that REST matches, and tokens of a continuation, in the original's experiments."""


class Node:
    """A node of a trie."""

    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.children: dict[int, Node] = {}
        """Children by token; the one inserted last is the last."""
        self.count = 0
        """Number of times that the node was inserted."""


class Trie:
    """All n-grams of the inserted texts, up to a length."""

    def __init__(self, depth: int) -> None:
        self.root = Node()
        self._depth = depth

    def insert(self, tokens: Sequence[int]) -> None:
        """Insert every n-gram of a text."""
        for start in range(len(tokens)):
            node = self.root
            for token in tokens[start : start + self._depth]:
                child = node.children.pop(token, None) or Node()
                node.children[token] = child
                child.count += 1
                node = child

    def find(self, tokens: Sequence[int]) -> Node | None:
        """Return the node of an n-gram, or None if it was not inserted."""
        node = self.root
        for token in tokens:
            if (child := node.children.get(token)) is None:
                return None
            node = child
        return node


class Tree:
    """A draft that grows: nodes with the same path are merged."""

    def __init__(self, limit: int) -> None:
        """limit: number of nodes with which it is full."""
        self._limit = limit
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._places: dict[tuple[int, int], int] = {}

    @property
    def is_full(self) -> bool:
        """Whether the draft has its largest size."""
        return len(self.tokens) >= self._limit

    def add(self, parent: int, token: int) -> int:
        """Return the place of a child of `parent` (-1: of the context), which is added if it is not there."""
        if (parent, token) not in self._places:
            self._places[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
        return self._places[parent, token]

    def answer(self) -> Answer:
        """Return the draft."""
        return Answer(self.tokens, self.parents, [1.0] * len(self.tokens))


class SglangNgram(TextDrafter):
    """SGLang's n-gram drafter: a trie of the last tokens of every request; breadth first, the most recent child first.

    The algorithm of `python/sglang/srt/speculative/cpp_ngram/trie.cpp`, match type BFS. After every step the last 18
    tokens of the context are inserted. All matches are extended, longest first, until the draft is full; the
    longer the match and the deeper the node, the fewer children are followed. Nodes are never evicted here.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trie = Trie(SGLANG_DEPTH)

    def commit(self, sequence_id: int, tokens: np.ndarray) -> None:
        """Commit tokens, and insert the end of the context."""
        super().commit(sequence_id, tokens)
        self._trie.insert(self.texts[sequence_id].last(SGLANG_DEPTH))

    def speculate(self, sequence_id: int, limit: int) -> Answer:
        """Return a tree of `limit` tokens, or fewer if the matches have no more."""
        context, tree = self.texts[sequence_id].last(SGLANG_DEPTH), Tree(limit)
        narrowing = (SGLANG_MOST_BREADTH - SGLANG_LEAST_BREADTH) / (SGLANG_DEPTH - 1)
        for length in range(len(context), 0, -1):
            if (node := self._trie.find(context[-length:])) is not None:
                breadth = (SGLANG_DEPTH - 1 - length) * narrowing + SGLANG_LEAST_BREADTH
                self._extend(tree, node, breadth, narrowing)
        return tree.answer()

    def _extend(self, tree: Tree, node: Node, breadth: float, narrowing: float) -> None:
        waiting = deque([(-1, breadth, node)])
        while waiting and not tree.is_full:
            parent, breadth, node = waiting.popleft()
            recent = itertools.islice(reversed(node.children.items()), max(1, int(breadth)))
            for token, child in recent:
                if tree.is_full:
                    return
                waiting.append((tree.add(parent, token), breadth - narrowing, child))


class RestLike(TextDrafter):
    """REST (He et al., 2024): the most frequent continuations of the longest match in a datastore.

    The datastore has the outputs of all finished requests; the original's is made once, from other text. The last 16
    tokens are matched, then fewer, down to 2. Of the trie of the continuations, 10 tokens deep, the nodes that occur
    most often are drafted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trie = Trie(REST_LONGEST + REST_CONTINUATION)

    def end(self, sequence_id: int) -> None:
        """End a sequence, and add the output to the datastore."""
        text = self.texts[sequence_id]
        self._trie.insert(text.last(text.length - text.prompt_length))
        super().end(sequence_id)

    def speculate(self, sequence_id: int, limit: int) -> Answer:
        """Return a tree of the most frequent continuations."""
        context, tree = self.texts[sequence_id].last(REST_LONGEST), Tree(limit)
        for length in range(len(context), REST_SHORTEST - 1, -1):
            node = self._trie.find(context[-length:])
            if node is not None and node.children:
                self._extend(tree, node)
                break
        return tree.answer()

    def _extend(self, tree: Tree, node: Node) -> None:
        """Add nodes in the order of their counts, and of equal ones in that of insertion."""
        numbers = itertools.count()
        frontier: list[tuple[int, int, int, int, int, Node]] = []

        def offer(parent: int, depth: int, node: Node) -> None:
            for token, child in node.children.items():
                heapq.heappush(frontier, (-child.count, next(numbers), parent, depth, token, child))

        offer(-1, 1, node)
        while frontier and not tree.is_full:
            _, _, parent, depth, token, child = heapq.heappop(frontier)
            place = tree.add(parent, token)
            if depth < REST_CONTINUATION:
                offer(place, depth + 1, child)
