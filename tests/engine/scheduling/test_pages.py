"""Compare the page pool with a naive one, and test its integrity check."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.pages import PagePool


class NaivePool:
    """Naive pool: lists of owned pages, and a list of hashes in the order of their last use."""

    def __init__(self, count):
        self.count = count
        self.owned = []
        self.named = []  # (hash, page); idle ones in the order in which they became idle

    def owners(self, page):
        return sum(page in pages for pages in self.owned)

    def free(self):
        return sum(self.owners(page) == 0 for page in range(self.count))

    def evictable(self):
        return [page for _, page in self.named if self.owners(page) == 0]

    def forget(self, page):
        self.named = [(name, other) for name, other in self.named if other != page]

    def release(self, pages):
        for page in reversed(pages):
            if self.owners(page) == 0:
                self.named.sort(key=lambda entry: entry[1] == page)  # to the end, in stable order


@given(st.lists(st.tuples(st.sampled_from(["allocate", "free", "share", "register"]), st.integers(0, 11)), max_size=60))
def test_the_pool_equals_the_naive_one(actions):
    pool, naive = PagePool(8, 16), NaivePool(8)
    for action, number in actions:
        if action == "allocate" and number > pool.free_count:
            with pytest.raises(ValueError, match="cannot allocate"):
                pool.allocate(number)
        elif action == "allocate":
            unused = naive.free() - len(naive.evictable())
            evicted = naive.evictable()[: max(0, number - unused)]
            taken = pool.allocate(number)
            assert set(evicted) <= set(taken)
            assert not set(taken) & (set(naive.evictable()) - set(evicted))
            for page in evicted:
                naive.forget(page)
            naive.owned.append(taken)
        elif action == "free" and naive.owned:
            pages = naive.owned.pop(number % len(naive.owned))
            pool.free(pages)
            naive.release(pages)
        elif action == "share" and (page := pool.find(bytes([number]))) is not None:
            pool.share(page)
            naive.owned.append([page])
        elif action == "register" and naive.owned and naive.owned[-1]:
            page = naive.owned[-1][number % len(naive.owned[-1])]
            if pool.hash_of(page) is None:
                pool.register(page, bytes([number]))
                if bytes([number]) not in dict(naive.named):
                    naive.named.append((bytes([number]), page))
        pool.check_integrity(naive.owned)
        assert pool.free_count == naive.free()
        assert {name: pool.find(name) for name, _ in naive.named} == dict(naive.named)
        assert all((bytes([n]) in dict(naive.named)) == (pool.find(bytes([n])) is not None) for n in range(12))


def test_check_integrity_detects_lost_shared_and_unknown_pages():
    pool = PagePool(4, 8)
    pages = pool.allocate(2)
    pool.check_integrity([pages])
    for owned in ([], [pages, pages], [[*pages, 9]], [pages[:1]], [[*pages, 3]]):
        with pytest.raises(AssertionError):
            pool.check_integrity(owned)
    pool.share(pages[0])
    with pytest.raises(AssertionError, match="without a hash"):
        pool.check_integrity([pages, pages[:1]])
    pool.register(pages[0], b"name")
    pool.check_integrity([pages, pages[:1]])


def test_the_last_freed_page_is_evicted_first():
    """A page is useless in the prefix cache without the pages before it."""
    pool = PagePool(4, 8)
    pages = pool.allocate(4)
    for page in pages:
        pool.register(page, bytes([page]))
    pool.free(pages)
    assert pool.allocate(1) == pages[-1:]
    assert pool.find(bytes([pages[0]])) == pages[0]


def test_pages_of_a_new_pool_are_consecutive():
    assert PagePool(8, 16).allocate(4) == [0, 1, 2, 3]
