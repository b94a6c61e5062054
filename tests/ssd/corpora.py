"""What the tests of a whole corpus share: requests, and the checks that every state of one must pass."""

from __future__ import annotations

import numpy as np

from ssd.corpus.corpus import Corpus
from ssd.corpus.ring import PAD, SEPARATOR
from ssd.corpus.view import FROZEN
from ssd.types import Drafter
from tests.replay import progress_of

DEPTH = 8


def some_requests(count: int, seed: int = 0, size: int = 100, ids: int = 50) -> list[np.ndarray]:
    """Requests over few tokens, so that much repeats."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, ids, size).astype(np.uint32) for _ in range(count)]


def fill(corpus: Corpus, requests: list[np.ndarray], name: str | None = None) -> None:
    """Append requests one by one, each with a refresh."""
    for request in requests:
        corpus.append(request, name)
        corpus.refresh()


def settle(corpus: Corpus) -> None:
    """Let the merge that is under way end."""
    while corpus.is_merging:
        corpus.refresh()


def text_of(corpus: Corpus) -> np.ndarray:
    """All tokens remembered, oldest first."""
    state = corpus.state()
    return state.ring.read(state.oldest, state.head)


def holds(corpus: Corpus, run: np.ndarray) -> bool:
    """Whether the memory of the ring has a run of tokens anywhere."""
    return run.tobytes() in corpus.state().ring.slots.tobytes()


def assert_whole(corpus: Corpus) -> None:
    """Each usable position stands once in one of the orders, and each order is sorted.

    The first positions of all may be missing: what stood before them may be gone.
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
    """All that is drafted along requests, step by step; nothing is learned from them."""
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
