"""Counts of the tokens in a sequence, for penalties."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.speculation.draft_tree import DraftTree


class Occurrences(NamedTuple):
    """Counts of D tokens before each of R rows."""

    tokens: np.ndarray
    """int64 [D], distinct."""
    in_prompt: np.ndarray
    """bool [D]: whether the prompt has the token."""
    counts: np.ndarray
    """float32 [R, D]: number of occurrences of each token in the output before each row."""


class TokenCounts:
    """Counts the tokens of a sequence as they are committed."""

    def __init__(self, prompt: np.ndarray, max_length: int) -> None:
        """prompt: uint32 [P], of a sequence of at most `max_length` tokens."""
        distinct = np.unique(prompt)
        self._columns = {token: column for column, token in enumerate(distinct.tolist())}
        self._prompt_columns = len(distinct)
        self._tokens = np.empty(max_length, np.int64)
        self._tokens[: len(distinct)] = distinct
        self._counts = np.zeros(max_length, np.float32)

    def add(self, tokens: np.ndarray) -> None:
        """Count committed tokens, uint32 [n]."""
        for token in tokens.tolist():
            column = self._columns.setdefault(token, len(self._columns))
            self._tokens[column] = token
            self._counts[column] += 1

    def along(self, draft: np.ndarray, tree: DraftTree | None = None) -> Occurrences:
        """Return the counts before each of R = k + 1 rows: after the committed tokens and each of a draft, uint32 [k].

        tree: shape of the draft; None for a path.
        """
        drafted = draft.tolist()
        known = len(self._columns)
        unknown = [token for token in dict.fromkeys(drafted) if token not in self._columns]
        columns = {token: known + index for index, token in enumerate(unknown)}
        counts = np.zeros((len(drafted) + 1, known + len(unknown)), np.float32)
        counts[:, :known] = self._counts[:known]
        for index, token in enumerate(drafted):
            column = self._columns.get(token)
            after = slice(index + 1, None) if tree is None else 1 + np.flatnonzero(tree.sees[:, index])
            counts[after, columns[token] if column is None else column] += 1
        tokens = np.concatenate((self._tokens[:known], np.array(unknown, np.int64)))
        return Occurrences(tokens, np.arange(len(tokens)) < self._prompt_columns, counts)
