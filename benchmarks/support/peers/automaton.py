"""Drafts from suffix automata of the active requests, as TensorRT-LLM's SA decoding makes them. Re-implemented."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks.support.peers.text_drafter import Answer, TextDrafter, path

CONTEXT = 64
"""Context tokens that are matched in other requests."""


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
        context = self.texts[sequence_id].last(CONTEXT)
        for other, automaton in self._automata.items():
            if other == sequence_id:
                continue
            found, first_end = automaton.match(context)
            if found > length and first_end < self.texts[other].length:
                length, end, owner = found, first_end, other
        if length == 0:
            return path([])
        return path(self.texts[owner].tokens[end : end + limit].tolist())
