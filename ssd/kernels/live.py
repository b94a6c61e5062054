"""The live tier: the output of running requests, which other requests can draft before it is finished.

The text is kept in blocks of a fixed size, each of one running request, its owner. Each block, and text after a gap
within a block, begins with a separator and the last tokens before it. The threads that draft publish what their
requests have produced, and merge the positions of the new text into a suffix array, unless these are so many that the
corpus's own thread had better do it.

There are two suffix arrays: searches read the front one, and a merge writes the other one once no search reads it any
more. The text of a request that has ended is not offered any more. Its blocks leave the suffix array with the next
merge, and are used again once no search reads the suffix array before that merge.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple
from weakref import WeakSet

import numpy as np

from ssd.corpus.ring import PAD, SEPARATOR
from ssd.corpus.suffix_array import ALL_POSITIONS, find_places, merge_some, sort_positions
from ssd.kernels.arrays import addresses_of, allocate, opener
from ssd.kernels.evidence import BLOCK_BITS
from ssd.kernels.jit import (
    Bool,
    Int,
    LongRows,
    Longs,
    Nothing,
    acquire,
    add_to,
    inline,
    kernel,
    outline,
    peek,
    release,
    try_acquire,
)
from ssd.kernels.match import TIER_NEWEST, TIER_SIZE, TIER_SLOTS, TIER_SUFFIXES, TIER_TEXT
from ssd.sequences.tables import IS_SHARED, LIVE_END, OWNER, PUBLISHED, SHARED_FROM, SIZE, TAG, TEXT

BLOCK = 1 << BLOCK_BITS
BLOCKS = 4096
PUBLISHED_AT_ONCE = BLOCK
"""Number of tokens of a request that are published at once; earlier ones that were not published yet are left out."""
SMALL_MERGE, ADDED_COST = 1 << 13, 32
"""Largest merge that the drafting thread does, in positions that are copied, and the number of copies that take as long
as adding one position. 8192 copies take about as long as waking another thread."""

# Owners of blocks that belong to no running request.
ENDED, LEAVING, LEFT, FREE = -1, -2, -3, -4
"""ENDED: the front suffix array refers to the block. LEAVING: the merge in progress leaves it out. LEFT: the other
suffix array may refer to it, and may have readers. FREE: neither of them does."""

# Entries of `LiveArrays.facts`.
ADDED, ENDING, OLD, USED, NEXT = range(5)
"""Number of positions that wait for a merge; numbers of blocks that are ENDED, and LEFT; number of blocks, from the
first one on, that were ever used; number of blocks, from the first one on, none of which is FREE."""


class LiveArrays(NamedTuple):
    """The arrays of a live tier. Block 0 stays empty, so that position 0 can mean a new block."""

    text: Annotated[np.ndarray, np.uint32, "padded"]
    owners: Annotated[np.ndarray, np.int64, "blocks"]
    tags: Annotated[np.ndarray, np.uint16, "blocks"]
    """Tag of each owner, see `ssd.corpus.rollout.Rollout.tag`."""
    suffixes: Annotated[np.ndarray, np.uint32, 2, "slots"]
    """The suffix arrays."""
    sizes: Annotated[np.ndarray, np.int64, 2]
    """Their numbers of positions."""
    readers: Annotated[np.ndarray, np.uint32, 2]
    """Number of searches that read each of them."""
    front: Annotated[np.ndarray, np.uint32, 1]
    """Which of them is the front one."""
    added: Annotated[np.ndarray, np.uint32, "slots"]
    """Positions that wait for a merge."""
    sorted: Annotated[np.ndarray, np.uint32, "slots"]
    """Scratch of a merge: the positions that it adds."""
    kept: Annotated[np.ndarray, np.uint32, "slots"]
    """Scratch of a merge: the positions of the front suffix array that remain."""
    places: Annotated[np.ndarray, np.int64, "slots"]
    """Scratch of a merge: where the added positions belong among these."""
    facts: Annotated[np.ndarray, np.int64, 5]
    writing: Annotated[np.ndarray, np.uint32, 1]
    """Lock of the text, the owners, `added` and `facts`."""
    merging: Annotated[np.ndarray, np.uint32, 1]
    """Lock of the scratch and of the suffix array that is not the front one, which is never waited for."""


open_live = opener(LiveArrays, "blocks", "slots", "padded")
"""Returns the `LiveArrays` of `LiveTier.addresses` to a kernel."""
BYTES_PER_SLOT = 32
"""Memory of all arrays with an element for each slot."""

_TIERS: WeakSet[LiveTier] = WeakSet()


class LiveTier:
    """The live tier of a corpus. Any thread may use it."""

    def __init__(self, depth: int, blocks: int = BLOCKS) -> None:
        """depth: maximum match length in tokens. blocks: number of blocks, one of which stays empty."""
        self._depth = depth
        # Memory that was never written takes no room.
        self.arrays = allocate(LiveArrays, blocks=blocks, slots=blocks * BLOCK, padded=blocks * BLOCK + PAD)
        self.arrays.text[: BLOCK + 1] = SEPARATOR
        self.arrays.owners[:] = FREE
        self.arrays.facts[USED] = self.arrays.facts[NEXT] = 1
        self.addresses = addresses_of(self.arrays, blocks, blocks * BLOCK, blocks * BLOCK + PAD)
        """int64, as `open_live` expects them."""
        _TIERS.add(self)

    def publish(self, state: np.ndarray, rows: np.ndarray) -> bool:
        """Offer what sequences have produced to others; return whether another thread should call `merge`.

        state: int64 [R, STATE_COLUMNS], see `ssd.sequences.tables`; its columns about this tier are updated. rows:
        int64 [B], those of the sequences.
        """
        return bool(self._run(_publish, state, rows))

    def end(self, owner: int) -> bool:
        """Offer the text of an owner to nobody any more; return whether another thread should call `merge`."""
        return bool(self._run(_end, owner))

    def merge(self) -> None:
        """Let searches find what was published, and free blocks, unless another thread merges, or reads too long."""
        self._run(_merge)

    @property
    def is_waiting(self) -> bool:
        """Whether searches do not find all published tokens yet, or still meet some of requests that have ended."""
        facts = self.arrays.facts
        # In this order: a merge takes the lock before it takes over what waits, and holds it until that can be found.
        return bool(facts[ADDED] or facts[ENDING] or self.arrays.merging[0])

    @property
    def nbytes(self) -> int:
        """Largest memory in bytes that its blocks can have taken so far."""
        return BYTES_PER_SLOT * BLOCK * (int(self.arrays.facts[USED]) - 1) + self.arrays.owners.nbytes

    def _run(self, kernel: Callable[..., Any], *given: Any) -> Any:
        """Call a kernel, and release the lock of a merge that fails for want of memory."""
        try:
            return kernel(self.addresses, *given, self._depth)
        except MemoryError:
            self.abandon_merge()
            raise

    def abandon_merge(self) -> None:
        """Undo what a merge that was not completed has begun; the positions that it would have added are lost."""
        _abandon_merge(self.addresses)


def _release_locks() -> None:
    """Make all tiers usable in a forked child, in which the threads that merged or read them do not exist."""
    for tier in _TIERS:
        tier.arrays.writing[:] = tier.arrays.readers[:] = 0
        tier.abandon_merge()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_locks)


@outline
def enter(live, tier):  # type: ignore[no-untyped-def]
    """Begin to read the front suffix array; return which one it is, for `leave`. tier: a row of tiers, written."""
    readers, front = live.readers.ctypes.data, live.front.ctypes.data
    which = np.int64(add_to(front, np.uint32(0)))
    add_to(readers + 4 * which, np.uint32(1))
    while np.int64(add_to(front, np.uint32(0))) != which:  # A merge may have begun to write it.
        leave(live, which)
        which = np.int64(add_to(front, np.uint32(0)))
        add_to(readers + 4 * which, np.uint32(1))
    tier[TIER_TEXT], tier[TIER_SUFFIXES] = live.text.ctypes.data, live.suffixes[which].ctypes.data
    tier[TIER_SIZE], tier[TIER_NEWEST], tier[TIER_SLOTS] = live.sizes[which], 0, 1
    return which


@inline
def leave(live, which):  # type: ignore[no-untyped-def]
    """End the reading that `enter` began."""
    add_to(live.readers.ctypes.data + 4 * which, np.uint32(0xFFFF_FFFF))


@outline
def _free_blocks(live):  # type: ignore[no-untyped-def]
    """Free the blocks that are LEFT, unless a search may read the suffix array that refers to them."""
    other = 1 - np.int64(live.front[0])
    if add_to(live.readers.ctypes.data + 4 * other, np.uint32(0)) != 0:
        return
    for block in range(live.facts[USED] - 1, 0, -1):
        if live.owners[block] == LEFT:
            live.facts[NEXT] = min(live.facts[NEXT], block)
            live.owners[block] = FREE
    live.facts[OLD] = 0


@inline
def _open_block(live, sequence):  # type: ignore[no-untyped-def]
    """Return the place of a sequence's new block, 0 if no block is free."""
    block, used = live.facts[NEXT], live.facts[USED]
    while block < used and live.owners[block] != FREE:
        block += 1
    live.facts[NEXT] = block
    if block == len(live.owners):
        return np.int64(0)
    live.facts[USED] = max(used, block + 1)
    place = block * BLOCK
    # A reader that continues past the end of this block must find a separator.
    live.text[place : place + BLOCK + 1] = SEPARATOR
    live.owners[block], live.tags[block] = sequence[OWNER], sequence[TAG]
    return place


@inline
def _write_prefix(live, place, sequence, at, depth):  # type: ignore[no-untyped-def]
    """Skip a slot, which stays a separator, and repeat the tokens before token `at` of a sequence after it.

    Returns the place of that token.
    """
    place += 1
    for index in range(max(sequence[SHARED_FROM], at - depth), at):
        live.text[place] = peek(sequence[TEXT], index)
        place += 1
    return place


@outline
def _publish_one(live, sequence, depth):  # type: ignore[no-untyped-def]
    """Append the tokens of a sequence that were not published yet; they are left out while no block is free."""
    size, place, facts = sequence[SIZE], sequence[LIVE_END], live.facts
    at = max(sequence[PUBLISHED], size - PUBLISHED_AT_ONCE)
    if at > sequence[PUBLISHED] and place % BLOCK != 0:
        has_room = BLOCK - place % BLOCK > 1 + depth
        place = _write_prefix(live, place, sequence, at, depth) if has_room else np.int64(0)
    for index in range(at, size):
        if place % BLOCK == 0:
            place = _open_block(live, sequence)
            if place == 0:
                break
            place = _write_prefix(live, place, sequence, index, depth)
        live.text[place] = peek(sequence[TEXT], index)
        if live.text[place - 1] != SEPARATOR:
            live.added[facts[ADDED]] = place
            facts[ADDED] += 1
        place += 1
    sequence[PUBLISHED], sequence[LIVE_END] = size, place


@outline
def _begin_merge(live):  # type: ignore[no-untyped-def]
    """Take the positions that wait, and leave out the blocks that have ended; return the numbers of both."""
    count, leaving = live.facts[ADDED], 0
    live.sorted[:count] = live.added[:count]
    live.facts[ADDED] = 0
    for block in range(1, live.facts[USED] if live.facts[ENDING] > 0 else 0):
        if live.owners[block] == ENDED:
            live.owners[block] = LEAVING
            leaving += 1
    live.facts[ENDING] = 0
    return count, leaving


@inline
def _without_leaving(live, positions, size, kept):  # type: ignore[no-untyped-def]
    """Copy those of `positions[:size]` whose blocks remain; return their number."""
    count = 0
    for index in range(size):
        kept[count] = positions[index]
        count += live.owners[positions[index] >> BLOCK_BITS] != LEAVING
    return count


@outline
def _merge_all(live, depth):  # type: ignore[no-untyped-def]
    """Write the next suffix array and make it the front one, unless another thread does, or a search still reads it."""
    if not try_acquire(live.merging):
        return
    which = np.int64(live.front[0])
    other = 1 - which
    if add_to(live.readers.ctypes.data + 4 * other, np.uint32(0)) == 0:
        acquire(live.writing)
        count, leaving = _begin_merge(live)
        release(live.writing)
        positions, size = live.suffixes[which], live.sizes[which]
        if leaving > 0:
            count = _without_leaving(live, live.sorted, count, live.sorted)
            size = _without_leaving(live, positions, size, live.kept)
            positions = live.kept
        text, added = live.text.ctypes.data, live.sorted.ctypes.data
        sort_positions(text, added, count, depth)
        find_places(text, positions.ctypes.data, size, added, 0, live.places, count, depth)
        into = live.suffixes[other].ctypes.data
        merge_some(
            positions.ctypes.data, size, added, count, live.places, into, ALL_POSITIONS, (0, 0, 0), size + count + 1
        )
        live.sizes[other] = size + count
        add_to(live.front.ctypes.data, np.uint32(other) - np.uint32(which))
        if leaving > 0:
            acquire(live.writing)
            for block in range(1, live.facts[USED]):
                if live.owners[block] == LEAVING:
                    live.owners[block] = LEFT
            live.facts[OLD] += leaving
            release(live.writing)
    release(live.merging)


@inline
def _merge_if_small(live, depth):  # type: ignore[no-untyped-def]
    """Merge if that takes no longer than waking another thread; return whether another thread should merge."""
    facts = live.facts
    if facts[ADDED] + facts[ENDING] == 0:
        return False
    if live.sizes[np.int64(live.front[0])] + ADDED_COST * facts[ADDED] > SMALL_MERGE:
        return True
    _merge_all(live, depth)
    return facts[ADDED] + facts[ENDING] > 0


@kernel(Longs, LongRows, Longs, Int, returns=Bool)
def _publish(addresses, state, rows, depth):  # type: ignore[no-untyped-def]
    """See `LiveTier.publish`."""
    live = open_live(addresses)
    acquire(live.writing)
    if live.facts[OLD] > 0:
        _free_blocks(live)
    for row in rows:
        if state[row, IS_SHARED]:
            _publish_one(live, state[row], depth)
    release(live.writing)
    return _merge_if_small(live, depth)


@kernel(Longs, Int, returns=Nothing)
def _merge(addresses, depth):  # type: ignore[no-untyped-def]
    """See `LiveTier.merge`."""
    _merge_all(open_live(addresses), depth)


@kernel(Longs, Int, Int, returns=Bool)
def _end(addresses, owner, depth):  # type: ignore[no-untyped-def]
    """See `LiveTier.end`."""
    live = open_live(addresses)
    acquire(live.writing)
    for block in range(1, live.facts[USED]):
        if live.owners[block] == owner:
            live.owners[block] = ENDED
            live.facts[ENDING] += 1
    release(live.writing)
    return _merge_if_small(live, depth)


@kernel(Longs, returns=Nothing)
def _abandon_merge(addresses):  # type: ignore[no-untyped-def]
    """See `LiveTier.abandon_merge`."""
    live = open_live(addresses)
    acquire(live.writing)
    live.facts[ENDING] = live.facts[OLD] = 0
    for block in range(1, live.facts[USED]):
        if live.owners[block] == LEAVING:
            live.owners[block] = ENDED
        live.facts[ENDING] += live.owners[block] == ENDED
        live.facts[OLD] += live.owners[block] == LEFT
    release(live.writing)
    release(live.merging)
