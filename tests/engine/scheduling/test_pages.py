"""Compare the page pool with a naive one."""

import itertools

import numpy as np
import pytest

from engine.scheduling.pages import PagePool
from tests.engine.integrity import check_pages
from tests.strategies import examples


def hashes_of(*numbers):
    """Hashes that share their place in the index, so that pages are found behind others."""
    return np.array([(number % 2, number) for number in numbers], np.uint64).reshape(-1, 2)


def find(pool, number):
    """The page with a hash; None without one."""
    return next(iter(pool.find(hashes_of(number)).tolist()), None)


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


ACTIONS = ["allocate"] * 4 + ["free"] * 4 + ["share"] * 2 + ["register"] * 6 + ["forget all"]


@pytest.mark.parametrize("seed", range(examples(100).max_examples))
def test_the_pool_equals_the_naive_one(seed):
    pool, naive, rng = PagePool(8, 16), NaivePool(8), np.random.default_rng(seed)
    for _ in range(60):
        action, number = rng.choice(ACTIONS), int(rng.integers(12))
        number = number // 3 if action == "allocate" else number
        if action == "allocate" and number > pool.free_count:
            with pytest.raises(ValueError, match="cannot allocate"):
                pool.allocate(number)
        elif action == "allocate":
            unused = naive.free() - len(naive.evictable())
            evicted = naive.evictable()[: max(0, number - unused)]
            taken = pool.allocate(number).tolist()
            assert set(evicted) <= set(taken)
            assert not set(taken) & (set(naive.evictable()) - set(evicted))
            for page in evicted:
                naive.forget(page)
            naive.owned.append(taken)
        elif action == "free" and naive.owned:
            pages = naive.owned.pop(number % len(naive.owned))
            pool.free(np.array(pages, np.int32))
            naive.release(pages)
        elif action == "share" and (page := find(pool, number)) is not None:
            pool.share(np.array([page], np.int32))
            naive.owned.append([page])
        elif action == "register" and naive.owned and naive.owned[-1]:
            page = naive.owned[-1][number % len(naive.owned[-1])]
            if page not in [other for _, other in naive.named]:
                pool.register(np.array([page], np.int32), hashes_of(number))
                if number not in dict(naive.named):
                    naive.named.append((number, page))
        elif action == "forget all" and all(naive.owners(page) < 2 for page in range(8)):
            pool.forget()
            naive.named = []
        check_pages(pool, [np.array(pages, np.int32) for pages in naive.owned])
        assert pool.free_count == naive.free()
        names = dict(naive.named)
        assert [find(pool, each) for each in range(12)] == [names.get(each) for each in range(12)]
        known = np.array(list(names.values()), np.int32)
        assert pool.count_owned(known) == len([*itertools.takewhile(naive.owners, names.values())])


def test_find_stops_at_the_first_missing_page():
    pool = PagePool(4, 8)
    pages = pool.allocate(3)
    pool.register(pages, hashes_of(1, 2, 3))
    assert pool.find(hashes_of(1, 2, 9, 3)).tolist() == pages[:2].tolist()
    pool.free(pages[1:])
    assert pool.count_owned(pages) == 1
