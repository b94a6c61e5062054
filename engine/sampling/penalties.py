"""Penalties for tokens that are in the text already.

Only tokens that occurred are touched, so the work grows with them and not with the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.speculation.draft_tree import DraftTree


class Occurrences(NamedTuple):
    """What the text holds of D tokens, at each of R places."""

    tokens: np.ndarray
    """int64 [D], each once."""
    in_prompt: np.ndarray
    """bool [D]."""
    counts: np.ndarray
    """float32 [R, D]: how often each is in the output before each place."""


class TokenCounts:
    """How often each token is in a sequence, kept as tokens are committed."""

    def __init__(self, prompt: np.ndarray, max_length: int) -> None:
        """prompt: uint32 [P], of a sequence of at most `max_length` tokens."""
        distinct = np.unique(prompt)
        self._places = {token: place for place, token in enumerate(distinct.tolist())}
        self._of_prompt = len(distinct)
        self._tokens = np.empty(max_length, np.int64)
        self._tokens[: len(distinct)] = distinct
        self._counts = np.zeros(max_length, np.float32)

    def add(self, tokens: np.ndarray) -> None:
        """Count tokens that were committed, uint32 [n]."""
        for token in tokens.tolist():
            place = self._places.setdefault(token, len(self._places))
            self._tokens[place] = token
            self._counts[place] += 1

    def along(self, draft: np.ndarray, tree: DraftTree | None = None) -> Occurrences:
        """Behind the committed tokens and behind each token of a draft, uint32 [k]; R = k + 1.

        tree: the draft's shape; without, it is a path.
        """
        drafted = draft.tolist()
        known = len(self._places)
        unknown = [token for token in dict.fromkeys(drafted) if token not in self._places]
        places = {token: known + index for index, token in enumerate(unknown)}
        counts = np.zeros((len(drafted) + 1, known + len(unknown)), np.float32)
        counts[:, :known] = self._counts[:known]
        for index, token in enumerate(drafted):
            place = self._places.get(token)
            behind = slice(index + 1, None) if tree is None else 1 + np.flatnonzero(tree.sees[:, index])
            counts[behind, places[token] if place is None else place] += 1
        tokens = np.concatenate((self._tokens[:known], np.array(unknown, np.int64)))
        return Occurrences(tokens, np.arange(len(tokens)) < self._of_prompt, counts)


class Penalised(NamedTuple):
    """N logits to be penalised, as flat arrays."""

    rows: np.ndarray
    """int64 [N], and no (row, token) twice."""
    tokens: np.ndarray
    """int64 [N]."""
    in_prompt: np.ndarray
    """bool [N]."""
    counts: np.ndarray
    """float32 [N]."""
    repetition: np.ndarray
    """float32 [N]: the penalty that applies."""
    presence: np.ndarray
    """float32 [N]."""
    frequency: np.ndarray
    """float32 [N]."""


def penalise(logits: Tensor, penalised: Penalised) -> None:
    """Apply penalties to logits, float32 [M, V], in place.

    Repetition is that of CTRL (Keskar et al., 2019), over prompt and output; the others are OpenAI's, over the output.
    """
    rows, tokens, in_prompt, counts, repetition, presence, frequency = (
        torch.from_numpy(array).to(logits.device) for array in penalised
    )
    values = logits[rows, tokens]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(in_prompt | (counts > 0), repeated, values)
    logits[rows, tokens] = values - frequency * counts - presence * (counts > 0)
