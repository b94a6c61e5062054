"""Pages of the KV cache: who owns which, and what they are called. Knows nothing of what is stored in them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence


class PagePool:
    """Hands out page numbers and takes them back.

    A page has any number of owners. One that was given a name can be found by it, also after its last owner has left:
    it then stays idle until its room is needed, the least recently used page going first.
    """

    def __init__(self, count: int, page_size: int) -> None:
        """`count` pages of `page_size` tokens."""
        self.count = count
        self.page_size = page_size
        self._unused = list(range(count - 1, -1, -1))
        """Pages without owner and name."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Pages with a name and without owner, the least recently used first."""
        self._owners = [0] * count
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Pages that nobody owns, and that can be taken."""
        return len(self._unused) + len(self._idle)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens`."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """`count` pages without a name, in ascending order. Raises ValueError if there are too few."""
        if count > self.free:
            raise ValueError(f"{count} pages wanted, {self.free} free")
        taken = [self._unused.pop() if self._unused else self._evict() for _ in range(count)]
        for page in taken:
            self._owners[page] = 1
        # Neighbours are read faster.
        return sorted(taken)

    def share(self, page: int) -> None:
        """One more owner for a page that `find` gave."""
        if self._owners[page] == 0:
            del self._idle[page]
        self._owners[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """One owner less for each of `pages`; those without any may be taken again at once, the last ones first."""
        for page in reversed(pages):
            self._owners[page] -= 1
            if self._owners[page] > 0:
                continue
            if page in self._name_of:
                self._idle[page] = None
            else:
                self._unused.append(page)

    def name(self, page: int, name: bytes) -> None:
        """Let an owned page be found by `name`, unless another page is."""
        if name not in self._page_of:
            self._page_of[name] = page
            self._name_of[page] = name

    def find(self, name: bytes) -> int | None:
        """The page of that name, with or without owners."""
        return self._page_of.get(name)

    def name_of(self, page: int) -> bytes | None:
        """What a page is called."""
        return self._name_of.get(page)

    def is_owned(self, page: int) -> bool:
        """Whether a page has an owner."""
        return self._owners[page] > 0

    def check_integrity(self, owned: Sequence[Sequence[int]]) -> None:
        """Raises AssertionError unless each page has as many owners as there are lists of `owned` that hold it, none
        is free twice or both free and owned, only named pages have several owners, and names and pages are one to one.
        """
        owners = Counter(page for pages in owned for page in pages)
        if [owners[page] for page in range(self.count)] != self._owners or owners.total() != sum(self._owners):
            raise AssertionError("a page is lost, foreign, or has other owners than it counts")
        if sorted([*self._unused, *self._idle, *owners]) != list(range(self.count)):
            raise AssertionError("a page is free twice, or free and owned")
        if {name: page for page, name in self._name_of.items()} != self._page_of:
            raise AssertionError("names and pages are not one to one")
        if not self._idle.keys() <= self._name_of.keys() or not self._name_of.keys().isdisjoint(self._unused):
            raise AssertionError("an idle page has no name, or an unused one has")
        if any(count > 1 and page not in self._name_of for page, count in owners.items()):
            raise AssertionError("a page without a name is shared")

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._name_of.pop(page)]
        return page
