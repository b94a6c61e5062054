"""Compare the page pool with a naive one."""

import itertools

import numpy as np
import pytest

from engine.scheduling.pages import UNUSED, PagePool
from tests.engine.integrity import check_pages, idle_pages
from tests.engine.scheduling.naive_table import NaivePages
from tests.strategies import examples


def hashes_of(*numbers):
    """Hashes that share their place in the index, so that pages are found behind others."""
    return np.array([(number % 2, number) for number in numbers], np.uint64).reshape(-1, 2)


def find(pool, number):
    """The page with a hash; None without one."""
    return next(iter(pool.find(hashes_of(number)).tolist()), None)


ACTIONS = ["allocate"] * 4 + ["free"] * 4 + ["share"] * 2 + ["register"] * 6 + ["forget all"]


@pytest.mark.parametrize("seed", range(examples(100).max_examples))
def test_the_pool_equals_the_naive_one(seed):
    pool, naive, rng, owned = PagePool(8, 16), NaivePages(8), np.random.default_rng(seed), []
    for _ in range(60):
        action, number = rng.choice(ACTIONS), int(rng.integers(12))
        number = number // 3 if action == "allocate" else number
        if action == "allocate" and number > pool.free_count:
            with pytest.raises(ValueError, match="cannot allocate"):
                pool.allocate(number)
        elif action == "allocate":
            owned.append(pool.allocate(number).tolist())
            assert owned[-1] == naive.take(number)
        elif action == "free" and owned:
            pages = owned.pop(number % len(owned))
            pool.free(np.array(pages, np.int32))
            naive.free(pages)
        elif action == "share" and (page := find(pool, number)) is not None:
            pool.share(np.array([page], np.int32))
            naive.share(page)
            owned.append([page])
        elif action == "register" and owned and owned[-1]:
            page = owned[-1][number % len(owned[-1])]
            if page not in naive.named.values():
                pool.register(np.array([page], np.int32), hashes_of(number))
                naive.named.setdefault(number, page)
        elif action == "forget all" and max(naive.owners.values(), default=0) < 2:
            pool.forget()
            naive.forget()
        check_pages(pool, [np.array(pages, np.int32) for pages in owned])
        assert pool.arrays.unused[: pool.arrays.counts[UNUSED]].tolist() == naive.unused
        assert idle_pages(pool) == naive.idle
        assert [find(pool, each) for each in range(12)] == [naive.named.get(each) for each in range(12)]
        known = np.array(list(naive.named.values()), np.int32)
        assert pool.count_owned(known) == len([*itertools.takewhile(naive.owners.get, naive.named.values())])


def test_find_stops_at_the_first_missing_page():
    pool = PagePool(4, 8)
    pages = pool.allocate(3)
    pool.register(pages, hashes_of(1, 2, 3))
    assert pool.find(hashes_of(1, 2, 9, 3)).tolist() == pages[:2].tolist()
    pool.free(pages[1:])
    assert pool.count_owned(pages) == 1
