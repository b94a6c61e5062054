"""Allocation of KV cache pages, with reference counts and a prefix cache, as arrays that kernels read and write."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.scheduling.page_hashes import WORDS
from ssd.kernels.jit import Int, IntRows, Ints, Longs, Nothing, UlongRows, fields_of, inline, kernel

UNUSED, IDLE = range(2)
"""Elements of `Pool.counts`."""
BEFORE, AFTER = range(2)
"""Columns of `Pool.links`."""
FREE = -1
"""Marks a place of `Pool.places` without a page."""


class Pool(NamedTuple):
    """The state of C pages."""

    counts: np.ndarray
    """int64 [2]: numbers of unused and of idle pages."""
    unused: np.ndarray
    """int32 [C]: a stack of the pages without an owner and without a hash."""
    owners: np.ndarray
    """int32 [C]: number of owners of each page."""
    links: np.ndarray
    """int32 [C + 1, 2]: a ring of the idle pages, which have a hash and no owner: the page before and the page after
    each. The last row is its start: the least recently used page comes after it."""
    hashes: np.ndarray
    """uint64 [C, WORDS]: hash of each page in `places`."""
    places: np.ndarray
    """int32 [a power of two]: pages by hash, or FREE; a page lies at the place of its hash or, without a gap, after
    it."""
    has_hash: np.ndarray
    """int32 [C]: 1 for pages in `places`, otherwise 0."""


POOL = fields_of(Pool, Longs, Ints, Ints, IntRows, UlongRows, Ints, Ints)


class PagePool:
    """Allocates and frees page numbers.

    A page may have several owners. A page with a hash can be found by it even after its last owner has freed it. Such a
    page is idle until its memory is needed; the least recently used idle page is evicted first.
    """

    def __init__(self, count: int, page_size: int) -> None:
        """`count` pages of `page_size` tokens."""
        self.count = count
        self.page_size = page_size
        self.arrays = Pool(
            counts=np.array([count, 0], np.int64),
            unused=np.arange(count - 1, -1, -1, dtype=np.int32),
            owners=np.zeros(count, np.int32),
            links=np.full((count + 1, 2), count, np.int32),
            hashes=np.zeros((count, WORDS), np.uint64),
            places=np.full(1 << (2 * count).bit_length(), FREE, np.int32),
            has_hash=np.zeros(count, np.int32),
        )

    @property
    def free_count(self) -> int:
        """Number of pages without an owner, which can be allocated."""
        return int(self.arrays.counts.sum())

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages needed for `tokens` tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> np.ndarray:
        """Return `count` pages without a hash, int32 [count], ascending. Raises ValueError if fewer are free."""
        if count > self.free_count:
            raise ValueError(f"cannot allocate {count} pages: {self.free_count} are free")
        pages = np.empty(count, np.int32)
        take_pages(self.arrays, pages)
        return pages

    def share(self, pages: np.ndarray) -> None:
        """Add an owner to each of `pages`, int32 [n], which `find` returned."""
        share_pages(self.arrays, pages)

    def free(self, pages: np.ndarray) -> None:
        """Remove one owner of each page, int32 [n]. Of those that become idle, the last of `pages` is evicted first."""
        free_pages(self.arrays, pages)

    def register(self, pages: np.ndarray, hashes: np.ndarray) -> None:
        """Register owned pages, int32 [n], under their hashes, uint64 [n, WORDS], where no other page has the hash."""
        register_pages(self.arrays, pages, hashes)

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """Return the pages with these hashes, up to the first hash without a page, int32 [at most n].

        hashes: uint64 [n, WORDS].
        """
        pages = np.empty(len(hashes), np.int32)
        return pages[: find_pages(self.arrays, hashes, pages)]

    def count_owned(self, pages: np.ndarray) -> int:
        """Return the number of leading pages, of int32 [n], that have an owner."""
        return int(np.append(self.arrays.owners[pages] > 0, False).argmin())

    def forget(self) -> None:
        """Drop all hashes, so that no page is found any more. Pages with an owner keep it and must not be shared."""
        pool = self.arrays
        idle = np.flatnonzero((pool.has_hash == 1) & (pool.owners == 0))
        first = int(pool.counts[UNUSED])
        pool.unused[first : first + len(idle)] = idle
        pool.counts[:] = first + len(idle), 0
        pool.links[:] = self.count
        pool.has_hash[:] = 0
        pool.places[:] = FREE


@inline
def _place_of(pool, first, second):
    """Return the place of a hash in the index, or the free place where it would be inserted."""
    mask = len(pool.places) - 1
    place = np.int64(first & np.uint64(mask))
    while pool.places[place] != FREE:
        page = pool.places[place]
        if pool.hashes[page, 0] == first and pool.hashes[page, 1] == second:
            break
        place = (place + 1) & mask
    return place


@inline
def _unlink(pool, page):
    """Take a page out of the ring of idle pages."""
    before, after = pool.links[page, BEFORE], pool.links[page, AFTER]
    pool.links[before, AFTER], pool.links[after, BEFORE] = after, before
    pool.counts[IDLE] -= 1


@inline
def _evict(pool):
    """Return the least recently used idle page, without its hash."""
    page = pool.links[len(pool.owners), AFTER]
    _unlink(pool, page)
    place, mask = _place_of(pool, pool.hashes[page, 0], pool.hashes[page, 1]), len(pool.places) - 1
    pool.has_hash[page] = 0
    # Close the gap: move later pages of the same run that may lie at the free place.
    after = (place + 1) & mask
    while pool.places[after] != FREE:
        wanted = np.int64(pool.hashes[pool.places[after], 0] & np.uint64(mask))
        if ((after - wanted) & mask) >= ((after - place) & mask):
            pool.places[place] = pool.places[after]
            place = after
        after = (after + 1) & mask
    pool.places[place] = FREE
    return page


@kernel(POOL, Ints, returns=Nothing)
def take_pages(pool, pages):
    """Write pages without a hash to `pages`, which get an owner; enough must be free."""
    for index in range(len(pages)):
        if pool.counts[UNUSED] > 0:
            pool.counts[UNUSED] -= 1
            pages[index] = pool.unused[pool.counts[UNUSED]]
        else:
            pages[index] = _evict(pool)
        pool.owners[pages[index]] = 1
    # Attention reads adjacent pages faster.
    pages.sort()


@kernel(POOL, Ints, returns=Nothing)
def share_pages(pool, pages):
    """See `PagePool.share`."""
    for page in pages:
        if pool.owners[page] == 0:
            _unlink(pool, page)
        pool.owners[page] += 1


@kernel(POOL, Ints, returns=Nothing)
def free_pages(pool, pages):
    """See `PagePool.free`."""
    start = len(pool.owners)
    for page in pages[::-1]:
        pool.owners[page] -= 1
        if pool.owners[page] > 0:
            continue
        if pool.has_hash[page] == 0:
            pool.unused[pool.counts[UNUSED]] = page
            pool.counts[UNUSED] += 1
            continue
        last = pool.links[start, BEFORE]
        pool.links[page, BEFORE], pool.links[page, AFTER] = last, start
        pool.links[last, AFTER], pool.links[start, BEFORE] = page, page
        pool.counts[IDLE] += 1


@kernel(POOL, Ints, UlongRows, returns=Nothing)
def register_pages(pool, pages, hashes):
    """See `PagePool.register`."""
    for index in range(len(pages)):
        place = _place_of(pool, hashes[index, 0], hashes[index, 1])
        if pool.places[place] == FREE:
            page = pages[index]
            pool.places[place] = page
            pool.hashes[page, 0], pool.hashes[page, 1] = hashes[index, 0], hashes[index, 1]
            pool.has_hash[page] = 1


@kernel(POOL, UlongRows, Ints, returns=Int)
def find_pages(pool, hashes, pages):
    """Write the result of `PagePool.find` to `pages`, and return its length."""
    for index in range(len(hashes)):
        page = pool.places[_place_of(pool, hashes[index, 0], hashes[index, 1])]
        if page == FREE:
            return index
        pages[index] = page
    return len(hashes)
