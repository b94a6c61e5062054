"""Other projects' drafters that need no model.

Arctic and transformers' prompt lookup are the packages themselves; `make peers` installs them. The others are
re-implementations of published algorithms with the originals' defaults.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from benchmarks.support.replaying import Candidate
from drafter_service.commands.advise.arctic import ArcticDrafter, OneByOne

PLD_LONGEST = 2
"""Context tokens that are searched for first; the default of transformers."""
VLLM_SHORTEST, VLLM_LONGEST = 2, 5
"""Lengths of matches in the example of vLLM's documentation (`prompt_lookup_min`, `prompt_lookup_max`)."""
AUTOMATON_CONTEXT = 64
"""Context tokens that suffix automata match in other requests."""
SGLANG_DEPTH = 18
SGLANG_LEAST_BREADTH, SGLANG_MOST_BREADTH = 1, 10
"""SGLang's defaults (`speculative_ngram_*`)."""

REST_LONGEST, REST_SHORTEST = 16, 2
REST_CONTINUATION = 10
"""Context tokens that REST matches, and tokens of a continuation, in the original's experiments."""


class Answer(NamedTuple):
    """A draft, with the names of Arctic's package."""

    token_ids: list[int]
    parents: list[int]
    """Index of each token's parent, -1 for a child of the context; parents precede their children."""
    probs: list[float]
    """Ones; the originals estimate no probabilities."""


def path(tokens: Sequence[int] | np.ndarray) -> Answer:
    """Return a draft without branches."""
    return Answer([int(token) for token in tokens], list(range(-1, len(tokens) - 1)), [1.0] * len(tokens))


class TextDrafter(OneByOne):
    """A drafter that is asked for one sequence at a time, and knows its text. A subclass overrides what it needs."""

    def __init__(self) -> None:
        self.texts: dict[int, np.ndarray] = {}
        """Prompt and committed output of each running sequence, uint32 [N], by sequence id."""

    def start(self, sequence_id: int, prompt: np.ndarray) -> None:
        """Begin a sequence with its prompt, uint32 [P]."""
        self.texts[sequence_id] = prompt

    def commit(self, sequence_id: int, tokens: np.ndarray) -> None:
        """Commit tokens, uint32 [n]."""
        self.texts[sequence_id] = np.concatenate((self.texts[sequence_id], tokens))

    def end(self, sequence_id: int) -> None:
        """End a sequence, whose tokens are all committed."""
        del self.texts[sequence_id]


class PromptLookup(TextDrafter):
    """Prompt lookup as in transformers: drafts after the first occurrence of the last 2 tokens, or else of the last."""

    def __init__(self) -> None:
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

        super().__init__()
        self._generator = PromptLookupCandidateGenerator(max_matching_ngram_size=PLD_LONGEST, max_length=1 << 62)

    def speculate(self, sequence_id: int, limit: int) -> Answer:
        """Return the tokens after the match."""
        import torch

        self._generator.num_output_tokens = limit
        context = torch.from_numpy(self.texts[sequence_id].astype(np.int64))[None]
        return path(self._generator.get_candidates(context)[0][0, context.shape[1] :].tolist())


class VllmNgram(TextDrafter):
    """vLLM's `ngram`: drafts after the first occurrence of the longest match of 5 down to 2 tokens of the context.

    The algorithm of `vllm/v1/spec_decode/ngram_proposer.py`; the original searches all lengths in one pass.
    """

    def speculate(self, sequence_id: int, limit: int) -> Answer:
        """Return the tokens after the match."""
        text = self.texts[sequence_id]
        matches = np.arange(1, len(text))
        # Ends of occurrences of the last tokens, for longer and longer matches; the end of the text itself is left out.
        ends: list[np.ndarray] = []
        for length in range(1, VLLM_LONGEST + 1):
            matches = matches[matches >= length]
            matches = matches[text[matches - length] == text[len(text) - length]]
            if len(matches) == 0:
                break
            ends.append(matches)
        if len(ends) < VLLM_SHORTEST:
            return path([])
        end = int(ends[-1][0])
        return path(text[end : end + limit])


class SuffixAutomaton:
    """The suffix automaton of a text that grows (Blumer et al., 1985).

    A state stands for the substrings that end at the same positions.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        """Length of each state's longest substring."""
        self._end = [0]
        """Number of tokens before the first end of each state's substrings."""
        self._last = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        state = self._new({}, self._length[self._last] + 1, self._length[self._last] + 1)
        before = self._last
        while before != -1 and token not in self._next[before]:
            self._next[before][token] = state
            before = self._link[before]
        self._last = state
        if before == -1:
            self._link[state] = 0
            return
        target = self._next[before][token]
        if self._length[target] > self._length[before] + 1:
            target = self._split(target, before, token)
        self._link[state] = target

    def _split(self, target: int, before: int, token: int) -> int:
        """Give the short substrings of a state, which now also end elsewhere, a state of their own; return it."""
        clone = self._new(dict(self._next[target]), self._length[before] + 1, self._end[target])
        self._link[clone] = self._link[target]
        while before != -1 and self._next[before].get(token) == target:
            self._next[before][token] = clone
            before = self._link[before]
        self._link[target] = clone
        return clone

    def _new(self, following: dict[int, int], length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(-1)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1

    def repeated(self) -> tuple[int, int]:
        """Return length and first end of the longest suffix of the text that also ends earlier in it."""
        state = max(0, self._link[self._last])
        return self._length[state], self._end[state]

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return length and first end of the longest suffix of `tokens` that is in the text."""
        state = length = 0
        for token in tokens:
            while state and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state = self._next[state][token]
                length += 1
        return length, self._end[state] if length else 0


class SuffixAutomata(TextDrafter):
    """TensorRT-LLM's SA decoding with its global pool: the longest match in all active requests, own text first.

    Drafts the tokens after the first occurrence of the longest match. When a request ends, its automaton is removed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._automata: dict[int, SuffixAutomaton] = {}

    def start(self, sequence_id: int, prompt: np.ndarray) -> None:
        """Begin a sequence, and index its prompt."""
        super().start(sequence_id, prompt)
        self._automata[sequence_id] = SuffixAutomaton()
        self._automata[sequence_id].extend(prompt.tolist())

    def commit(self, sequence_id: int, tokens: np.ndarray) -> None:
        """Commit tokens, and index them."""
        super().commit(sequence_id, tokens)
        self._automata[sequence_id].extend(tokens.tolist())

    def end(self, sequence_id: int) -> None:
        """Forget the request."""
        super().end(sequence_id)
        del self._automata[sequence_id]

    def speculate(self, sequence_id: int, limit: int) -> Answer:
        """Return the tokens after the longest match."""
        (length, end), owner = self._automata[sequence_id].repeated(), sequence_id
        context = self.texts[sequence_id][-AUTOMATON_CONTEXT:].tolist()
        for other, automaton in self._automata.items():
            if other == sequence_id:
                continue
            found, first_end = automaton.match(context)
            if found > length and first_end < len(self.texts[other]):
                length, end, owner = found, first_end, other
        if length == 0:
            return path([])
        return path(self.texts[owner][end : end + limit])


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
        self._trie.insert(self.texts[sequence_id][-SGLANG_DEPTH:].tolist())

    def speculate(self, sequence_id: int, limit: int) -> Answer:
        """Return a tree of `limit` tokens, or fewer if the matches have no more."""
        context, tree = self.texts[sequence_id][-SGLANG_DEPTH:].tolist(), Tree(limit)
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
        self._prompt_lengths: dict[int, int] = {}

    def start(self, sequence_id: int, prompt: np.ndarray) -> None:
        """Begin a sequence with its prompt, uint32 [P]."""
        super().start(sequence_id, prompt)
        self._prompt_lengths[sequence_id] = len(prompt)

    def end(self, sequence_id: int) -> None:
        """End a sequence, and add the output to the datastore."""
        self._trie.insert(self.texts[sequence_id][self._prompt_lengths.pop(sequence_id) :].tolist())
        super().end(sequence_id)

    def speculate(self, sequence_id: int, limit: int) -> Answer:
        """Return a tree of the most frequent continuations."""
        context, tree = self.texts[sequence_id][-REST_LONGEST:].tolist(), Tree(limit)
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


PACKAGES = {"arctic": "arctic_inference", "pld": "transformers"}
"""Packages that peers need."""
WITH_K: dict[str, tuple[Any, str]] = {
    "pld": (PromptLookup, "path"),
    "vllm-ngram": (VllmNgram, "path"),
    "sglang-ngram": (SglangNgram, "tree"),
    "rest-like": (RestLike, "tree"),
    "suffix-automata": (SuffixAutomata, "path"),
}
"""Peers whose only setting is the size of drafts, and the shape of their drafts."""
PEERS = ("arctic", *WITH_K)
ARCTIC_GRID = {"k": (16, 32), "shape": ("path", "tree"), "factor": (1.0, 4.0), "least_prob": (0.1, 0.05, 0.01)}


def missing(peer: str) -> str | None:
    """Return the reason why a peer cannot be replayed; None if it can."""
    package = PACKAGES.get(peer)
    return None if package is None or find_spec(package) else f"{package} is not installed (make peers)"


def peer_candidates(peer: str, ks: Sequence[int]) -> Iterator[Candidate]:
    """Return the settings of a peer; Arctic has its own values of k."""
    if peer in WITH_K:
        build, shape = WITH_K[peer]
        for k in ks:
            yield Candidate(peer, f"k={k}", lambda _: build(), k, shape)
        return
    for k, shape, factor, least_prob in itertools.product(*ARCTIC_GRID.values()):
        yield Candidate(
            "arctic",
            f"{shape} k={k} factor={factor:g} p={least_prob:g}",
            lambda _, settings=(factor, least_prob), is_tree=shape == "tree": ArcticDrafter(*settings, is_tree=is_tree),
            k,
            shape,
        )
