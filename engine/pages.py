"""Pages of the KV cache: who owns which. Knows nothing of what is stored in them."""

from __future__ import annotations


class PagePool:
    """Hands out page numbers and takes them back."""

    def __init__(self, count: int, page_size: int) -> None:
        """`count` pages of `page_size` tokens."""
        self.count = count
        self.page_size = page_size
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens`."""
        return -(-tokens // self.page_size)

    def can_take(self, tokens: int) -> bool:
        """Whether there are pages for `tokens` now."""
        return self.pages_for(tokens) <= self.free

    def take(self, tokens: int) -> list[int]:
        """Pages for `tokens`, the lowest numbers last freed first. Raises ValueError if there are too few."""
        needed = self.pages_for(tokens)
        if needed > self.free:
            raise ValueError(f"{needed} pages wanted, {self.free} free")
        taken = self._free[len(self._free) - needed :]
        del self._free[len(self._free) - needed :]
        return taken[::-1]

    def give_back(self, pages: list[int]) -> None:
        """Return pages; they may be taken again at once."""
        self._free.extend(reversed(pages))

    def check_integrity(self, owned: list[list[int]]) -> None:
        """Raises AssertionError unless every page is free or owned by exactly one of `owned`."""
        everything = sorted(self._free + [page for pages in owned for page in pages])
        if everything != list(range(self.count)):
            raise AssertionError("a page is lost, shared or foreign")
