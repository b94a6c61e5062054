"""Consistency of pages and sequences, checked between steps."""

from __future__ import annotations

import numpy as np

from engine.scheduling.page_hashes import PageHashes
from engine.scheduling.pages import AFTER, FREE, IDLE, UNUSED


def idle_pages(pool):
    """The idle pages of a pool, the least recently used first."""
    links, pages = pool.arrays.links, []
    page = int(links[pool.count, AFTER])
    while page != pool.count and len(pages) <= pool.count:
        pages.append(page)
        page = int(links[page, AFTER])
    return pages


def check_pages(pool, owned):
    """Each page has as many owners as page tables in `owned` contain it, and is free once if it has none.

    Only pages with a hash are idle or have several owners, and each of them is found by its hash.
    """
    arrays = pool.arrays
    owners = np.bincount(np.concatenate([np.empty(0, np.int64), *owned]).astype(np.int64), minlength=pool.count)
    assert owners.tolist() == arrays.owners.tolist()
    unused, idle = arrays.unused[: arrays.counts[UNUSED]].tolist(), idle_pages(pool)
    assert sorted([*unused, *idle, *np.flatnonzero(owners)]) == list(range(pool.count))
    assert len(idle) == arrays.counts[IDLE]
    assert not arrays.has_hash[unused].any()
    assert arrays.has_hash[[*idle, *np.flatnonzero(owners > 1)]].all()
    registered = np.flatnonzero(arrays.has_hash)
    assert [pool.find(arrays.hashes[[page]]).tolist() for page in registered] == [[page] for page in registered]
    assert np.count_nonzero(arrays.places != FREE) == len(registered)


def check_integrity(scheduler):
    """Running sequences are older than waiting ones and have the pages that they need; the others have none."""
    pool, size = scheduler.pages, scheduler.pages.page_size
    check_pages(pool, [sequence.held_pages for sequence in scheduler.running])
    ids = [sequence.sequence_id for sequence in (*scheduler.running, *scheduler.waiting)]
    assert ids == sorted(set(ids))
    assert not any(len(sequence.held_pages) or sequence.computed for sequence in scheduler.waiting)
    for sequence in scheduler.running:
        assert len(sequence.held_pages) >= pool.pages_for(sequence.computed)
        full = sequence.computed // size
        is_known = pool.arrays.has_hash[sequence.held_pages] == 1
        assert not is_known[full:].any()
        hashes = PageHashes(sequence.request.salt, sequence.request.adapter)
        expected = hashes.of(sequence.tokens, min(full, len(sequence) // size), size)
        found = pool.arrays.hashes[sequence.held_pages[: len(expected)]]
        assert (found == expected)[is_known[: len(expected)]].all()
