"""The index of one running request over its own prompt and output, kept over the turns of its session.

It has a large suffix array, and a small one of at most `FRESH_ROOM` positions. New tokens are inserted into the small
one, which is merged into the large one when it is full. So a token costs a few moves in the small array, and a fraction
1 / `FRESH_ROOM` of a pass over the large one.

A long text may be sorted in another thread. Until then the large array lacks it, so that its sequence has only the
drafts that need no match in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ssd.corpus.ring import SEPARATOR
from ssd.corpus.suffix_array import place_of, sort_positions
from ssd.kernels.jit import Int, inline, kernel, peek, poke

FRESH_ROOM = 256
MIN_ROOM = 1024
"""Minimum room of an index, in tokens."""
ROOM_KEPT = 3
"""Maximum room of an idle index as a multiple of its tokens; doubling alone reaches twice, plus room for a draft."""


@inline
def insert_fresh(text, suffixes, size, position, depth):  # type: ignore[no-untyped-def]
    """Insert a position into `suffixes[:size]`."""
    place, _, _ = place_of(text, suffixes, size, text, position, depth)
    for index in range(size, place, -1):
        poke(suffixes, index, peek(suffixes, index - 1))
    poke(suffixes, place, np.uint32(position))


@inline
def fold_fresh(text, suffixes, size, fresh, fresh_size, depth):  # type: ignore[no-untyped-def]
    """Merge the sorted `fresh[:fresh_size]` into `suffixes[:size]`, in place, from the end; return the new size."""
    end = size
    for index in range(fresh_size - 1, -1, -1):
        position = peek(fresh, index)
        place, _, _ = place_of(text, suffixes, end, text, position, depth)
        for at in range(end - 1, place - 1, -1):
            poke(suffixes, at + index + 1, peek(suffixes, at))
        poke(suffixes, place + index, position)
        end = place
    return size + fresh_size


@kernel(Int, Int, Int, Int, Int, Int, returns=Int)
def fold(text, suffixes, size, fresh, fresh_size, depth):  # type: ignore[no-untyped-def]
    """Call `fold_fresh` from Python."""
    return fold_fresh(text, suffixes, size, fresh, fresh_size, depth)


@dataclass(eq=False)
class Unsorted:
    """The positions of appended text, which `LocalIndex.adopt` takes once they are sorted."""

    text: np.ndarray
    """uint32 [room + 1]: a separator and the text."""
    suffixes: np.ndarray
    """uint32 [room]: the large suffix array, which the index lacks until then."""
    size: int
    """Number of positions in `suffixes`."""
    added: range
    """The positions that it lacks."""
    depth: int

    def sort(self) -> Unsorted:
        """Add the positions to `suffixes`, about 0.1 us each, and return this. Any thread may call it, once."""
        if self.added:
            positions = np.arange(self.added.start, self.added.stop, dtype=np.uint32)
            text, suffixes, added = self.text.ctypes.data + 4, self.suffixes.ctypes.data, positions.ctypes.data
            sort_positions(text, added, len(positions), self.depth)
            self.size = fold(text, suffixes, self.size, added, len(positions), self.depth)
        return self


class LocalIndex:
    """A request's prompt and output so far, and their sorted positions. Grows by doubling."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.size = 0
        self.sorted_size = 0
        self.fresh_size = 0
        self.room = 0
        self._text = np.full(1, SEPARATOR, np.uint32)
        self._sorted = np.empty(0, np.uint32)
        self._fresh = np.empty(FRESH_ROOM, np.uint32)
        self.reserve(MIN_ROOM)

    @property
    def tokens(self) -> np.ndarray:
        """uint32 [size]."""
        return self._text[1 : 1 + self.size]

    @property
    def fresh(self) -> np.ndarray:
        """The small suffixes, uint32 [FRESH_ROOM]; the first `fresh_size` are in use."""
        return self._fresh

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Addresses of the text, the large suffix array and the small one."""
        return self._text.ctypes.data + 4, self._sorted.ctypes.data, self._fresh.ctypes.data

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens in all."""
        if tokens > self.room:
            self._move(max(tokens, 2 * self.room))

    def shrink(self) -> None:
        """Release memory of a text that was much longer before."""
        if self.room > ROOM_KEPT * max(self.size, MIN_ROOM):
            self._move(max(self.size, MIN_ROOM))

    def shared_with(self, prompt: np.ndarray) -> int:
        """Return the length of the common prefix of the text and a prompt, uint32 [P]."""
        shared = min(self.size, len(prompt))
        differs = self.tokens[:shared] != prompt[:shared]
        return int(differs.argmax()) if differs.any() else shared

    def continue_with(self, prompt: np.ndarray) -> Unsorted:
        """Replace the text by a prompt, uint32 [P]; return the positions after the common prefix, see `append`."""
        shared = self.shared_with(prompt)
        if shared < self.size:
            self.truncate(shared)
        return self.append(prompt[shared:])

    def extend(self, tokens: np.ndarray) -> None:
        """Append many tokens, uint32 [n]: their positions are sorted, then merged."""
        self.adopt(self.append(tokens).sort())

    def append(self, tokens: np.ndarray) -> Unsorted:
        """Append tokens, uint32 [n], and return their positions, which the caller sorts and passes to `adopt`.

        Meanwhile the index has the small suffix array, and the text may grow token by token.
        """
        first, end = self.size, self.size + len(tokens)
        self.reserve(end)
        self._text[1 + first : 1 + end] = tokens
        self.size = end
        # A position needs a token before it and one after it.
        unsorted = Unsorted(self._text, self._sorted, self.sorted_size, range(max(1, first), end), self.depth)
        self._sorted, self.sorted_size = np.empty(self.room, np.uint32), 0
        return unsorted

    def adopt(self, unsorted: Unsorted) -> None:
        """Add positions that `append` returned and that are sorted now."""
        since, count = self._sorted, self.sorted_size
        self._sorted, self.sorted_size = unsorted.suffixes, unsorted.size
        if len(self._sorted) < self.room:  # The text has been moved meanwhile.
            self._move(self.room)
        text, suffixes, _ = self.addresses
        self.sorted_size = fold(text, suffixes, self.sorted_size, since.ctypes.data, count, self.depth)

    def truncate(self, size: int) -> None:
        """Forget all tokens but the first `size`."""
        kept = self._sorted[: self.sorted_size]
        fresh = self._fresh[: self.fresh_size]
        kept, fresh = kept[kept < size], fresh[fresh < size]
        self._sorted[: len(kept)] = kept
        self._fresh[: len(fresh)] = fresh
        self.size, self.sorted_size, self.fresh_size = size, len(kept), len(fresh)

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self._text.nbytes + self._sorted.nbytes + self._fresh.nbytes

    def _move(self, room: int) -> None:
        text, suffixes = np.empty(room + 1, np.uint32), np.empty(room, np.uint32)
        text[: self.size + 1] = self._text[: self.size + 1]
        suffixes[: self.sorted_size] = self._sorted[: self.sorted_size]
        self._text, self._sorted, self.room = text, suffixes, room
