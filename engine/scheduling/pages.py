"""Allocation of KV cache pages, with reference counts and a prefix cache."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence


class PagePool:
    """Allocates and frees page numbers.

    A page may have several owners. A page with a hash can be found by it even after its last owner has freed it. Such a
    page is idle until its memory is needed; the least recently used idle page is evicted first.
    """

    def __init__(self, count: int, page_size: int) -> None:
        """`count` pages of `page_size` tokens."""
        self.count = count
        self.page_size = page_size
        self._unused = list(range(count - 1, -1, -1))
        """Pages without an owner and without a hash."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Pages with a hash and without an owner, the least recently used first."""
        self._owners = [0] * count
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def free_count(self) -> int:
        """Number of pages without an owner, which can be allocated."""
        return len(self._unused) + len(self._idle)

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages needed for `tokens` tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Return `count` pages without a hash, in ascending order. Raises ValueError if fewer are free."""
        if count > self.free_count:
            raise ValueError(f"cannot allocate {count} pages: {self.free_count} are free")
        pages = [self._unused.pop() if self._unused else self._evict() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        # Attention reads adjacent pages faster.
        return sorted(pages)

    def share(self, page: int) -> None:
        """Add an owner to a page that `find` returned."""
        if self._owners[page] == 0:
            del self._idle[page]
        self._owners[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Remove one owner of each page. Of the pages that become idle, the last of `pages` is evicted first."""
        for page in reversed(pages):
            self._owners[page] -= 1
            if self._owners[page] > 0:
                continue
            if page in self._hash_of:
                self._idle[page] = None
            else:
                self._unused.append(page)

    def register(self, page: int, page_hash: bytes) -> None:
        """Register an owned page under its hash, unless another page already has this hash."""
        if page_hash not in self._page_of:
            self._page_of[page_hash] = page
            self._hash_of[page] = page_hash

    def find(self, page_hash: bytes) -> int | None:
        """Return the page with this hash, owned or idle."""
        return self._page_of.get(page_hash)

    def forget(self) -> None:
        """Drop all hashes, so that no page is found any more. Pages with an owner keep it and must not be shared."""
        self._unused += self._idle
        self._idle.clear()
        self._page_of.clear()
        self._hash_of.clear()

    def hash_of(self, page: int) -> bytes | None:
        """Return the hash that a page is registered under."""
        return self._hash_of.get(page)

    def is_owned(self, page: int) -> bool:
        """Return whether a page has an owner."""
        return self._owners[page] > 0

    def check_integrity(self, owned: Sequence[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool is consistent with `owned`, the page lists of all owners.

        Each page must have as many owners as lists contain it, be free at most once and not while it is owned; only
        registered pages have several owners; hashes and pages map one to one.
        """
        owners = Counter(page for pages in owned for page in pages)
        if [owners[page] for page in range(self.count)] != self._owners or owners.total() != sum(self._owners):
            raise AssertionError("a page is lost, unknown, or has another number of owners than is counted")
        if sorted([*self._unused, *self._idle, *owners]) != list(range(self.count)):
            raise AssertionError("a page is free twice, or free and owned")
        if {page_hash: page for page, page_hash in self._hash_of.items()} != self._page_of:
            raise AssertionError("hashes and pages do not map one to one")
        if not self._idle.keys() <= self._hash_of.keys() or not self._hash_of.keys().isdisjoint(self._unused):
            raise AssertionError("an idle page has no hash, or an unused page has one")
        if any(count > 1 and page not in self._hash_of for page, count in owners.items()):
            raise AssertionError("a page without a hash is shared")

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._hash_of.pop(page)]
        return page
