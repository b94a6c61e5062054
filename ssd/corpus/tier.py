"""A suffix array in two buffers, and merging: queries read one buffer while the maintainer writes the other.

Sorted positions are merged in slices, and old positions are left out in the same pass.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np

from ssd.corpus.memory import Buffer
from ssd.corpus.ring import Ring
from ssd.corpus.suffix_array import find_places, merge_some, merge_unsorted, usable_positions

READERS_LIMIT_S = 10.0
"""Time after which a change gives up waiting for readers, in seconds. Queries take milliseconds."""


class ReadersError(RuntimeError):
    """A suffix array that was replaced is still being read."""


class SuffixArray:
    """Positions sorted by the reversed text before them. They never change while this object is held."""

    __slots__ = ("__weakref__", "address", "positions")

    def __init__(self, positions: np.ndarray) -> None:
        self.positions = positions
        """uint32 [N]."""
        self.address: int = positions.ctypes.data

    def __len__(self) -> int:
        return len(self.positions)


def empty_suffix_array() -> SuffixArray:
    """Return a new empty suffix array. Tiers must not share one, since each waits until its own has no readers."""
    return SuffixArray(np.empty(0, np.uint32))


class Tier:
    """The newest suffix array over a text, and the buffer for its successor."""

    def __init__(self, room: int) -> None:
        """Make an empty tier whose suffix array can have up to `room` positions."""
        self.newest = empty_suffix_array()
        self._front, self._back = Buffer(room), Buffer(room)
        self._reading = threading.Lock()
        """Locked while the previous suffix array has readers."""
        self._retired: weakref.ref[SuffixArray] | None = None
        self._kept: list[tuple[Buffer, weakref.ref[np.ndarray]]] = []
        """Results of `keep` that may still be read, each with its buffer."""

    def keep(self) -> np.ndarray:
        """Return the newest positions, uint32 [N], for a reader that may take long, such as the writer of a file.

        Changes do not wait for this reader: they leave the buffer to it, and use another one.
        """
        positions = self.newest.positions[:]
        self._kept = [*self._still_kept(), (self._front, weakref.ref(positions))]
        return positions

    def _still_kept(self) -> list[tuple[Buffer, weakref.ref[np.ndarray]]]:
        return [pair for pair in self._kept if pair[1]() is not None]

    def next_buffer(self) -> Buffer:
        """Return the buffer for the next suffix array, after waiting until its old contents have no readers.

        Raises ReadersError after `READERS_LIMIT_S`, with nothing changed, as do the other changes.
        """
        self.wait_for_readers()
        old, kept = self._back, self._still_kept()
        self._kept = [pair for pair in kept if pair[0] is not old]
        if len(self._kept) < len(kept):
            self._back = Buffer(len(old))
        return self._back

    def publish(self, size: int) -> None:
        """Publish the first `size` positions of the next buffer as the newest suffix array."""
        self.replace(SuffixArray(self._back.array[:size]))
        self._front, self._back = self._back, self._front

    def replace(self, newest: SuffixArray) -> None:
        """Publish a suffix array in other memory, which may be read-only."""
        self.wait_for_readers()
        # A lock and not an event: the garbage collector may call `release` in this thread, even while it waits.
        reading = threading.Lock()
        reading.acquire()
        retired = weakref.ref(self.newest, lambda _: reading.release())
        self._reading, self._retired, self.newest = reading, retired, newest

    def wait_for_readers(self) -> None:
        """Wait until there are no references to the previous suffix array. Raises ReadersError."""
        if not self.wait_until_unread(READERS_LIMIT_S):
            raise ReadersError(f"an old suffix array is still being read after {READERS_LIMIT_S:.0f} s")

    def wait_until_unread(self, timeout_s: float) -> bool:
        """Wait until there are no references to the previous suffix array; return False after the timeout."""
        is_unread = self._reading.acquire(timeout=timeout_s)
        if is_unread:
            self._reading.release()
        return is_unread

    def release(self) -> None:
        """Release the memory of the next buffer, after waiting until it has no readers."""
        self.next_buffer().release()

    @property
    def nbytes(self) -> int:
        """Memory of the newest suffix array."""
        return self.newest.positions.nbytes


PLACES_AT_ONCE = 2048
COPIED_AT_ONCE = 1 << 20
"""Number of positions that one slice searches for, or copies, in a few milliseconds; new text waits for one slice."""


class Merge:
    """Merges `added` into a tier, which publishes the result when `step` returns True."""

    def __init__(self, tier: Tier, added: SuffixArray, ring: Ring, oldest: int, depth: int) -> None:
        """Prepare a merge; positions before `oldest` are left out."""
        self._tier, self._base, self._added = tier, tier.newest, added
        self._ring, self._depth = ring, depth
        self._window = oldest % ring.capacity, ring.head - oldest, ring.capacity
        self._places = np.empty(len(added), np.int64)
        self._found = 0
        self._progress = (0, 0, 0)
        """See `MergeProgress`."""
        self._into = tier.next_buffer()

    def step(self) -> bool:
        """Do a slice of the work; return whether it was the last one."""
        if self._found < len(self._added):
            until = min(len(self._added), self._found + PLACES_AT_ONCE)
            base, added = self._base, self._added
            find_places(
                self._ring.address,
                base.address,
                len(base),
                added.address,
                self._found,
                self._places,
                until,
                self._depth,
            )
            self._found = until
            return False
        self._progress = merge_some(
            self._base.address,
            len(self._base),
            self._added.address,
            len(self._added),
            self._places,
            self._into.address,
            self._window,
            self._progress,
            COPIED_AT_ONCE,
        )
        done, copied, size = self._progress
        if done < len(self._added) or copied < len(self._base):
            return False
        self._tier.publish(size)
        return True


def add_sorted(tier: Tier, ring: Ring, first: int, depth: int) -> None:
    """Merge the positions from `first` to the ring's head into a tier at once, which has no older ones to leave out."""
    added = np.empty(ring.head - first, np.uint32)
    size = usable_positions(ring.address, first % ring.capacity, len(added), ring.capacity, added.ctypes.data)
    base, into = tier.newest, tier.next_buffer()
    merge_unsorted(ring.address, base.address, len(base), added.ctypes.data, size, into.address, depth)
    tier.publish(len(base) + size)
