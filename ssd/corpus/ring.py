"""The circular buffer of remembered tokens: a hard bound, the newest overwrite the oldest.

Requests are kept apart by a separator, so that no match crosses from one into the next. A position is the number of
tokens written before it; position p lies in slot p modulo the size. Each end of the buffer repeats `PAD` slots of
the other, so a kernel reads that far to both sides of a slot without minding the end.
"""

from __future__ import annotations

import numpy as np

from ssd.corpus.memory import Buffer

SEPARATOR = np.uint32(0xFFFF_FFFF)
"""Stands behind every request; no token may have this id."""

MAX_TOKEN_ID = int(SEPARATOR) - 1

PAD = 128
"""Slots repeated at each end: the furthest that a match or a draft reads from a position."""

MIN_CAPACITY = 4096
MAX_CAPACITY = (1 << 32) - 1 - 2 * PAD
"""Tokens; slots are 32-bit numbers."""


def check_tokens(tokens: np.ndarray) -> None:
    """Raises ValueError unless `tokens` is uint32 [N] and none of them is the separator's id."""
    if tokens.dtype != np.uint32 or tokens.ndim != 1:
        raise ValueError(f"token ids must be a row of uint32, not {tokens.dtype} {list(tokens.shape)}")
    if len(tokens) and int(tokens.max()) > MAX_TOKEN_ID:
        raise ValueError(f"token ids must be at most {MAX_TOKEN_ID:,}; {int(SEPARATOR):,} separates requests")


def check_capacity(capacity: int) -> None:
    """Raises ValueError for a capacity outside `MIN_CAPACITY` to `MAX_CAPACITY` tokens."""
    if not MIN_CAPACITY <= capacity <= MAX_CAPACITY:
        raise ValueError(f"a corpus holds {MIN_CAPACITY:,} to {MAX_CAPACITY:,} tokens, not {capacity:,}")


class Ring:
    """`capacity` slots of tokens, separators included, of which those from `oldest` up to `head` are remembered.

    It does not forget by itself: its owner moves `oldest` once nobody reads what lies before it any more.
    """

    def __init__(self, capacity: int) -> None:
        """Raises ValueError for a capacity outside `MIN_CAPACITY` to `MAX_CAPACITY` tokens."""
        check_capacity(capacity)
        self.capacity = capacity
        self.head = 0
        """The next position to be written."""
        self.oldest = 0
        """The first position that is remembered."""
        self._buffer = Buffer(capacity + 2 * PAD)
        self.slots = self._buffer.array[PAD : PAD + capacity]
        """uint32 [capacity]."""
        self.address = self._buffer.address + 4 * PAD
        """Of slot 0; slots -PAD to capacity + PAD - 1 may be read."""
        # What stands before the first request ends its keys; it is repeated from the last slots.
        self._buffer.array[:PAD] = SEPARATOR
        self._buffer.array[-2 * PAD :] = SEPARATOR

    def __len__(self) -> int:
        return self.head - self.oldest

    @property
    def free(self) -> int:
        """Tokens that can be written before something must be forgotten."""
        return self.capacity - len(self)

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens, uint32 [N], N at most `free`."""
        self.fill(self.head, tokens)
        self.head += len(tokens)

    def fill(self, position: int, tokens: np.ndarray) -> None:
        """Set what stands from `position` on."""
        before, behind = self.slots_of(position, position + len(tokens))
        size = before.stop - before.start
        self.slots[before] = tokens[:size]
        self.slots[behind] = tokens[size:]
        self._repeat_ends(before)

    def erase(self, position: int, end: int) -> None:
        """Put separators in the place of positions `position` to `end` - 1. Nobody may be reading them."""
        before, behind = self.slots_of(position, end)
        self.slots[before] = SEPARATOR
        self.slots[behind] = SEPARATOR
        self._repeat_ends(before)

    def slots_of(self, position: int, end: int) -> tuple[slice, slice]:
        """Where positions `position` to `end` - 1 lie: up to the last slot, and on from slot 0."""
        at, size = position % self.capacity, end - position
        first = min(size, self.capacity - at)
        return slice(at, at + first), slice(0, size - first)

    def read(self, position: int, end: int) -> np.ndarray:
        """A copy of the tokens at positions `position` to `end` - 1, uint32."""
        before, behind = self.slots_of(position, end)
        return np.concatenate((self.slots[before], self.slots[behind]))

    def _repeat_ends(self, written: slice) -> None:
        if written.start < PAD or written.stop > self.capacity - PAD:
            self._buffer.array[:PAD] = self.slots[-PAD:]
            self._buffer.array[-PAD:] = self.slots[:PAD]
