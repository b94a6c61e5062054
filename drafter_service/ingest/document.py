"""Finished texts as token ids, many at once: what a load hands to whoever learns it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Documents:
    """D documents in a row. Each is an output, led by the last tokens of its prompt where there was one."""

    tokens: np.ndarray
    """uint32 [T]."""
    offsets: np.ndarray
    """uint32 [D + 1]: document i is `tokens[offsets[i]:offsets[i + 1]]`; none is empty."""
    names: list[str]
    """D request names: to forget a document by, and to recognise one that is loaded again."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def room(self) -> int:
        """Tokens that a corpus needs for them, separators included."""
        return len(self.tokens) + len(self)
