"""Helpers for tests of a whole corpus: requests, and checks of its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from ssd.corpus import index, ring, snapshot, tier
from ssd.corpus.corpus import Corpus
from ssd.corpus.ring import PAD, SEPARATOR
from ssd.corpus.view import FROZEN
from ssd.types import Drafter
from tests import naive
from tests.replay import replayed
from tests.ssd.addresses import uint32_at

DEPTH = 8


@contextmanager
def tiny_slices() -> Iterator[None]:
    """Return a context in which corpora may be tiny and are merged in tiny slices."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (ring, snapshot):
            patch.setattr(module, "MIN_CAPACITY", 2 * PAD)
        patch.setattr(index, "MIN_GAP", 128)
        patch.setattr(tier, "PLACES_AT_ONCE", 7)
        patch.setattr(tier, "COPIED_AT_ONCE", 50)
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


def assert_whole(corpus: Corpus, readable: int = DEPTH) -> None:
    """Check that each usable position is in exactly one suffix array, and that all of them are sorted.

    Positions whose keys reach into removed text are missing. readable: the first position of a corpus from which no
    text was removed that must be there; those of a snapshot may lack the first ones.
    """
    state, (tiers, ring, *_) = corpus.state(), corpus.view.arrays
    slots, oldest, head = state.ring.capacity, int(ring[1]), int(ring[2])
    padded = np.concatenate((state.ring.slots[-PAD:], state.ring.slots))
    positions = np.arange(oldest, head)
    usable = positions[padded[PAD + positions % slots - 1] != SEPARATOR]
    orders = [order.positions.astype(np.int64) for order in corpus.view.suffix_arrays[: FROZEN + 2]]
    found = np.sort(oldest + (np.concatenate(orders) - oldest) % slots)
    least = oldest + corpus.depth if oldest else readable
    assert np.array_equal(found[found >= least], usable[usable >= least])
    assert np.isin(found, usable).all()
    assert oldest == 0 or len(found) == 0 or found[0] >= least
    assert tiers[: FROZEN + 2, 2].tolist() == [len(order) for order in orders]
    for order in orders:
        keys = np.stack([padded[PAD + order - 1 - depth] for depth in range(corpus.depth)], axis=1).astype(np.int64)
        behind_end = np.cumsum(keys == SEPARATOR, axis=1) - (keys == SEPARATOR) > 0
        keys = np.where(behind_end, -1, keys)
        assert (np.lexsort(keys.T[::-1]) == np.arange(len(keys))).all()


def evidence_in(positions: np.ndarray, address: int) -> Counter:
    """Return the positions of a live tier as counts of (key, next token), after checking that they are sorted.

    address: of the tier's text.
    """
    order = positions.tolist()
    text = uint32_at(address, max(order, default=0) + 1).tolist()
    keys = [naive.key(text, position, DEPTH) for position in order]
    assert keys == sorted(keys)
    return Counter((tuple(key), text[position]) for key, position in zip(keys, order, strict=True))


def evidence_of(prefix: Sequence[int], produced: Sequence[int], hidden: Container[int] = ()) -> Counter:
    """Return the expected counts for a request's output after its prefix; hidden: indices of skipped tokens."""
    text = [naive.SEPARATOR, *prefix, *produced]
    return Counter(
        (tuple(naive.key(text, position, DEPTH)), text[position])
        for position in range(1 + len(prefix), len(text))
        if text[position - 1] != naive.SEPARATOR and position - 1 - len(prefix) not in hidden
    )


def drafts_of(drafter: Drafter, requests: list[np.ndarray], prompt: int = 20, limit: int = 16) -> list[list[object]]:
    """Return all drafts along requests, step by step; nothing is remembered."""
    return [
        [batch.tokens.tolist(), batch.accept_prob.tolist(), batch.source.tolist(), batch.parents.tolist()]
        for number, request in enumerate(requests)
        for batch, _, _ in replayed(drafter, number, request[:prompt], request[prompt:], limit, learn=False)
    ]
