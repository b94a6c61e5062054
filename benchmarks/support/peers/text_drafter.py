"""Base of re-implemented drafters, which keep the texts of the running sequences."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from drafter_service.commands.advise.arctic import OneByOne


class Answer(NamedTuple):
    """A draft, with the names of Arctic's package."""

    token_ids: list[int]
    parents: list[int]
    """Index of each token's parent, -1 for a child of the context; parents precede their children."""
    probs: list[float]
    """Ones; the originals estimate no probabilities."""


class Text:
    """The prompt of a sequence and its output so far."""

    def __init__(self, prompt: np.ndarray) -> None:
        self.prompt_length = self.length = len(prompt)
        self._buffer = prompt.copy()

    def append(self, tokens: np.ndarray) -> None:
        """Append committed tokens, uint32 [n]."""
        end = self.length + len(tokens)
        if end > len(self._buffer):
            self._buffer = np.concatenate((self._buffer[: self.length], np.empty(end, np.uint32)))
        self._buffer[self.length : end] = tokens
        self.length = end

    @property
    def tokens(self) -> np.ndarray:
        """uint32 [N]."""
        return self._buffer[: self.length]

    def last(self, count: int) -> list[int]:
        """Return the last tokens, at most `count`."""
        return self.tokens[max(0, self.length - count) :].tolist()


class TextDrafter(OneByOne):
    """A drafter that is asked for one sequence at a time, and knows its text. A subclass overrides what it needs."""

    def __init__(self) -> None:
        self.texts: dict[int, Text] = {}
        """Texts of the running sequences, by sequence id."""

    def start(self, sequence_id: int, prompt: np.ndarray) -> None:
        """Begin a sequence with its prompt, uint32 [P]."""
        self.texts[sequence_id] = Text(prompt)

    def commit(self, sequence_id: int, tokens: np.ndarray) -> None:
        """Commit tokens, uint32 [n]."""
        self.texts[sequence_id].append(tokens)

    def end(self, sequence_id: int) -> None:
        """End a sequence, whose tokens are all committed."""
        del self.texts[sequence_id]


def path(tokens: list[int]) -> Answer:
    """Return a draft without branches."""
    return Answer(tokens, list(range(-1, len(tokens) - 1)), [1.0] * len(tokens))
