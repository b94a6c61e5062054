"""The circular buffer of remembered tokens: a hard bound, the newest overwrite the oldest.

Requests are kept apart by a separator, so that no match crosses from one into the next.
"""

from __future__ import annotations

import numpy as np

SEPARATOR = np.uint32(0xFFFF_FFFF)
"""Stands behind every request; no token may have this id."""

MAX_TOKEN_ID = int(SEPARATOR) - 1

MAX_CAPACITY = (1 << 29) - 1
"""Tokens; sorting works on four bytes a token with 32-bit positions."""


def check_tokens(tokens: np.ndarray) -> None:
    """Raises ValueError if one of `tokens`, uint32 [N], is the separator's id."""
    if len(tokens) and int(tokens.max()) > MAX_TOKEN_ID:
        raise ValueError(f"token ids must be at most {MAX_TOKEN_ID:,}; {int(SEPARATOR):,} separates requests")


class Ring:
    """The last `capacity` tokens of finished requests, separators included."""

    def __init__(self, capacity: int) -> None:
        """Raises ValueError for a capacity outside 2 to `MAX_CAPACITY` tokens."""
        if not 2 <= capacity <= MAX_CAPACITY:
            raise ValueError(f"a ring holds 2 to {MAX_CAPACITY:,} tokens, not {capacity:,}")
        self.capacity = capacity
        self.appended = 0
        """Tokens ever written, separators included; tells whether anything came since."""
        self._slots = np.empty(capacity, np.uint32)

    def __len__(self) -> int:
        return min(self.appended, self.capacity)

    def append(self, tokens: np.ndarray) -> None:
        """Remember one request, uint32 [N]; of one that is longer than the ring only the end is kept.

        Raises ValueError if an id is the separator's.
        """
        if len(tokens) == 0:
            return
        check_tokens(tokens)
        kept = tokens[-(self.capacity - 1) :]
        self._write(kept)
        self._write(np.array([SEPARATOR], np.uint32))

    def text(self) -> np.ndarray:
        """A copy of what is remembered, oldest first, uint32 [len(self)]."""
        if self.appended <= self.capacity:
            return self._slots[: self.appended].copy()
        oldest = self.appended % self.capacity
        return np.concatenate((self._slots[oldest:], self._slots[:oldest]))

    def _write(self, tokens: np.ndarray) -> None:
        at = self.appended % self.capacity
        first = min(len(tokens), self.capacity - at)
        self._slots[at : at + first] = tokens[:first]
        self._slots[: len(tokens) - first] = tokens[first:]
        self.appended += len(tokens)
