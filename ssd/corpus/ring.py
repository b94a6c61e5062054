"""The circular buffer of remembered tokens, in which the newest overwrite the oldest.

A separator follows each request, so that no match crosses from one into the next. A position is the number of tokens
written before it; position p is in slot p modulo the size. Each end of the buffer repeats `PAD` slots of the other end,
so that kernels can read that far in both directions from any slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssd.corpus.memory import Buffer
from ssd.corpus.rollout import NO_TAG, TAGGED

SEPARATOR = np.uint32(0xFFFF_FFFF)
"""Token id that follows every request; text must not contain it."""

MAX_TOKEN_ID = int(SEPARATOR) - 1

UINT32 = np.dtype(np.uint32)

PAD = 128
"""Number of slots repeated at each end: the maximum distance that a match or a draft reads from a position."""

MIN_CAPACITY = 4096
MAX_SLOTS = (1 << 32) - 1 - 2 * PAD
"""Maximum number of slots of a ring; slots are 32-bit numbers."""
MAX_CAPACITY = MAX_SLOTS // 17 * 16
"""Maximum capacity of a corpus in tokens, whose ring has 1 / 16 more slots (`ssd.corpus.index.GAP_PART`)."""


def check_tokens(tokens: np.ndarray, vocab_size: int = 0) -> None:
    """Raise ValueError unless `tokens` is uint32 [N], without the separator's id and ids outside the vocabulary.

    vocab_size: 0 if it is not known.
    """
    if getattr(tokens, "dtype", None) != UINT32 or tokens.ndim != 1:
        raise ValueError(f"token ids must be a 1-D uint32 array, not {kind_of(tokens)}")
    if not has_invalid_token(tokens, vocab_size):
        return
    largest = int(tokens.max())
    if largest > MAX_TOKEN_ID:
        raise ValueError(f"token ids must be at most {MAX_TOKEN_ID:,}; {int(SEPARATOR):,} separates requests")
    raise ValueError(f"token id {largest} is outside the vocabulary of {vocab_size} tokens")


def has_invalid_token(tokens: np.ndarray, vocab_size: int = 0) -> bool:
    """Return whether `tokens`, uint32 [N], have the separator's id, or one outside the vocabulary (`check_tokens`)."""
    return any_of(tokens >= (np.uint32(vocab_size) if vocab_size else SEPARATOR))


def any_of(mask: np.ndarray) -> bool:
    """Return whether any element of a mask, bool [N], is set; numpy's functions take longer for a short one."""
    return 1 in mask.tobytes()


def kind_of(given: object) -> str:
    """Return dtype and shape of an array, such as "int64 [3]", or the type of another object; for messages."""
    if isinstance(given, np.ndarray):
        return f"{given.dtype} {list(given.shape)}"
    return f"a {type(given).__name__}"


def token_array(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return token ids as uint32 [N]. Raises ValueError for anything but integers from 0 to 2**32 - 1."""
    given = np.asarray(tokens)
    if given.ndim != 1 or (len(given) and given.dtype.kind not in "iu"):
        raise ValueError(f"a context must be a 1-D array of integers, not {given.dtype} {list(given.shape)}")
    if len(given) and not 0 <= int(given.min()) <= int(given.max()) < 1 << 32:
        raise ValueError("token ids must be 0 to 4,294,967,294")
    return np.array(given, np.uint32)


def check_capacity(capacity: int) -> None:
    """Raise ValueError for a capacity outside `MIN_CAPACITY` to `MAX_CAPACITY` tokens."""
    if not MIN_CAPACITY <= capacity <= MAX_CAPACITY:
        raise ValueError(f"a corpus holds {MIN_CAPACITY:,} to {MAX_CAPACITY:,} tokens, not {capacity:,}")


class Ring:
    """Slots of tokens and separators; positions `oldest` to `head` - 1 are remembered.

    The owner advances `oldest` once the text before it has no readers.
    """

    def __init__(self, capacity: int) -> None:
        """Make an empty ring. Raises ValueError for a capacity outside `MIN_CAPACITY` to `MAX_SLOTS` tokens."""
        if not MIN_CAPACITY <= capacity <= MAX_SLOTS:
            raise ValueError(f"a ring has {MIN_CAPACITY:,} to {MAX_SLOTS:,} slots, not {capacity:,}")
        self.capacity = capacity
        self.head = 0
        """The next position to be written."""
        self.oldest = 0
        """The first position that is remembered."""
        self.overwritten = 0
        """Text before this position may have been overwritten."""
        self.erasures = 0
        """Number of calls of `erase`."""
        self._buffer = Buffer(capacity + 2 * PAD)
        self.slots = self._buffer.array[PAD : PAD + capacity]
        """uint32 [capacity]."""
        self.address = self._buffer.address + 4 * PAD
        """Address of slot 0; slots -PAD to capacity + PAD - 1 may be read."""
        self.tags = np.zeros(capacity // TAGGED + 1, np.uint16)
        """uint16: tag of each `TAGGED` slots, see `Rollout.tag`. Not allocated before the first tag."""
        self.has_tags = False
        # Separators before slot 0 (and in the last slots, which they repeat) end the keys of the first request.
        self._buffer.array[:PAD] = SEPARATOR
        self._buffer.array[-2 * PAD :] = SEPARATOR

    def __len__(self) -> int:
        return self.head - self.oldest

    @property
    def free(self) -> int:
        """Number of tokens that can be written before old ones must be removed."""
        return self.capacity - len(self)

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens, uint32 [N], N at most `free`."""
        # Before the slots are written, so that a reader without a lock can check afterwards what it has read.
        self.overwritten = max(self.overwritten, self.head + len(tokens) - self.capacity)
        before, behind = self.slots_of(self.head, self.head + len(tokens))
        size = before.stop - before.start
        self.slots[before] = tokens[:size]
        self.slots[behind] = tokens[size:]
        self._repeat_ends(before)
        self.head += len(tokens)

    def tag(self, position: int, end: int, tag: int) -> None:
        """Tag the text at positions `position` to `end` - 1. A block of slots has the tag of most of its text."""
        for slots in self.slots_of(position, end):
            blocks = slice((slots.start + TAGGED // 2) // TAGGED, (slots.stop + TAGGED // 2) // TAGGED)
            if tag != NO_TAG or (self.has_tags and self.tags[blocks].any()):
                self.tags[blocks], self.has_tags = tag, True

    def erase(self, position: int, end: int) -> None:
        """Overwrite positions `position` to `end` - 1 with separators. There must be no readers."""
        self.erasures += 1  # As in `write`.
        before, behind = self.slots_of(position, end)
        self.slots[before] = SEPARATOR
        self.slots[behind] = SEPARATOR
        self._repeat_ends(before)

    def slots_of(self, position: int, end: int) -> tuple[slice, slice]:
        """Return the slots of positions `position` to `end` - 1: up to the last slot, and from slot 0 on."""
        at, size = position % self.capacity, end - position
        first = min(size, self.capacity - at)
        return slice(at, at + first), slice(0, size - first)

    def read(self, position: int, end: int) -> np.ndarray:
        """Return a copy of the tokens at positions `position` to `end` - 1, uint32."""
        before, behind = self.slots_of(position, end)
        return np.concatenate((self.slots[before], self.slots[behind]))

    def _repeat_ends(self, written: slice) -> None:
        if written.start < PAD or written.stop > self.capacity - PAD:
            self._buffer.array[:PAD] = self.slots[-PAD:]
            self._buffer.array[-PAD:] = self.slots[:PAD]
