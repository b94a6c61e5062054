"""Helpers for tests of a whole corpus: requests, and checks of its state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from ssd.corpus import index, merge, ring
from ssd.corpus.corpus import Corpus
from ssd.corpus.ring import PAD, SEPARATOR
from ssd.corpus.view import FROZEN
from ssd.types import Drafter
from tests.replay import progress_of

DEPTH = 8


@contextmanager
def tiny_slices() -> Iterator[None]:
    """Return a context in which corpora may be tiny and are merged in tiny slices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "MIN_CAPACITY", 2 * PAD)
        patch.setattr(index, "MIN_GAP", 128)
        patch.setattr(merge, "PLACES_AT_ONCE", 7)
        patch.setattr(merge, "COPIED_AT_ONCE", 50)
        yield


def some_requests(count: int, seed: int = 0, size: int = 100, ids: int = 50) -> list[np.ndarray]:
    """Return requests over few tokens, so that text repeats."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, ids, size).astype(np.uint32) for _ in range(count)]


def fill(corpus: Corpus, requests: list[np.ndarray], name: str | None = None) -> None:
    """Append requests one by one, each with a refresh."""
    for request in requests:
        corpus.append(request, name)
        corpus.refresh()


def no_memory(*_: object) -> None:
    """Fail, in place of a function that allocates memory."""
    raise MemoryError


def settle(corpus: Corpus) -> None:
    """Finish the merge in progress."""
    while corpus.is_merging:
        corpus.refresh()


def text_of(corpus: Corpus) -> np.ndarray:
    """Return all remembered tokens, oldest first."""
    state = corpus.state()
    return state.ring.read(state.oldest, state.head)


def holds(corpus: Corpus, run: np.ndarray) -> bool:
    """Return whether the ring's memory contains a run of tokens."""
    return run.tobytes() in corpus.state().ring.slots.tobytes()


def assert_whole(corpus: Corpus) -> None:
    """Check that each usable position is in exactly one suffix array, and that all of them are sorted.

    The oldest positions may be missing, since the text before them may be overwritten.
    """
    state, (tiers, _, ring) = corpus.state(), corpus.view.arrays
    slots, oldest, head = state.ring.capacity, int(ring[1]), int(ring[2])
    padded = np.concatenate((state.ring.slots[-PAD:], state.ring.slots))
    positions = np.arange(oldest, head)
    usable = positions[padded[PAD + positions % slots - 1] != SEPARATOR]
    orders = [order.positions.astype(np.int64) for order in corpus.view.suffix_arrays[: FROZEN + 2]]
    found = np.sort(oldest + (np.concatenate(orders) - oldest) % slots)
    assert np.array_equal(found[found >= oldest + corpus.depth], usable[usable >= oldest + corpus.depth])
    assert np.isin(found, usable).all()
    assert oldest == 0 or len(found) == 0 or found[0] >= oldest + corpus.depth
    assert tiers[: FROZEN + 2, 2].tolist() == [len(order) for order in orders]
    for order in orders:
        keys = np.stack([padded[PAD + order - 1 - depth] for depth in range(corpus.depth)], axis=1).astype(np.int64)
        behind_end = np.cumsum(keys == SEPARATOR, axis=1) - (keys == SEPARATOR) > 0
        keys = np.where(behind_end, -1, keys)
        assert (np.lexsort(keys.T[::-1]) == np.arange(len(keys))).all()


def drafts_of(drafter: Drafter, requests: list[np.ndarray], prompt: int = 20, limit: int = 16) -> list[list[object]]:
    """Return all drafts along requests, step by step; nothing is remembered."""
    drafts: list[list[object]] = []
    for number, request in enumerate(requests):
        drafter.start(number, request[:prompt])
        for at in range(prompt, len(request), 4):
            batch = drafter.draft(progress_of({number: request[at - 4 : at] if at > prompt else []}, limit))
            drafts.append(
                [batch.tokens.tolist(), batch.accept_prob.tolist(), batch.source.tolist(), batch.parents.tolist()]
            )
        drafter.finish(number, np.empty(0, np.uint32), learn=False)
    return drafts
