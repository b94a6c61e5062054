"""Suffix arrays: sorting, splitting for threads, searching and merging, compared with slow references."""

import os
import threading

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ssd.corpus.processors import usable_processors
from ssd.corpus.suffix_array import merge_some, sort_in_threads, split, usable_positions
from tests import naive
from tests.ssd.addresses import Text
from tests.strategies import LARGEST, array, requests

DEPTHS = st.sampled_from([1, 3, 32])


def keys(text, positions, depth):
    return [naive.key(text, position, depth) for position in positions]


@given(st.one_of(requests(), requests(max_size=40)), st.data())
def test_a_split_keeps_positions_after_the_same_token_together(written, data):
    text = naive.concatenated(written)
    positions = data.draw(st.permutations(naive.usable_positions(text)))
    if not positions:
        return
    kept, order = Text(text), array(positions)
    front = split(kept.address, order.ctypes.data, len(order))
    before = [[text[position - 1] for position in part] for part in (order[:front], order[front:])]
    assert sorted(order.tolist()) == sorted(positions)
    assert not before[0] or max(before[0]) < min(before[1])
    if len(set(before[0] + before[1])) == len(positions):
        assert abs(len(before[0]) - len(before[1])) <= 2


@given(st.one_of(requests(), requests(max_size=40)), DEPTHS, st.integers(1, 5))
@example([], 32, 1)
@example([[7] * 200], 32, 1)
@example([[7] * 20] * 20, 3, 1)
@example([[LARGEST, LARGEST - 1, LARGEST, LARGEST - 1]], 32, 1)
@example(np.random.default_rng(0).choice([1, 2, 2**31, LARGEST], (20, 80)).tolist(), 8, 1)
def test_any_number_of_threads_gives_the_same_result(written, depth, threads):
    text = naive.concatenated(written)
    kept, order = Text(text), array(naive.usable_positions(text))
    sort_in_threads(kept.address, order.ctypes.data, len(order), depth, threads)
    assert keys(text, order.tolist(), depth) == sorted(keys(text, naive.usable_positions(text), depth))
    assert sorted(order.tolist()) == naive.usable_positions(text)


def test_sorting_works_if_threads_cannot_start(monkeypatch):
    rng = np.random.default_rng(0)
    kept, order = Text(rng.integers(0, 50, 2000).tolist()), array(range(1, 2000))
    started = threading.Thread.start

    def start(thread):
        if thread.name.startswith("ssd-sort") and rng.random() < 0.5:
            raise RuntimeError("can't start new thread")
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    sort_in_threads(kept.address, order.ctypes.data, len(order), 8, threads=8)
    text = kept.tokens
    assert keys(text, order.tolist(), 8) == sorted(keys(text, range(1, 2000), 8))


def test_an_exception_in_a_thread_is_raised(monkeypatch):
    def sort(_text, _order, _size, _depth):
        raise MemoryError

    monkeypatch.setattr("ssd.corpus.suffix_array.sort_positions", sort)
    kept, order = Text(list(range(100))), array(range(1, 100))
    with pytest.raises(MemoryError):
        sort_in_threads(kept.address, order.ctypes.data, len(order), 8, threads=2)


def merged_by_kernel(order, added, places, oldest, alive, slots, budgets):
    """Merge in slices of the sizes in `budgets`, repeatedly; check that nothing else is written to the buffer."""
    guard = 0xDEAD_BEEF
    order_array, added_array = array(order), array(added)
    expected_size = len(naive.merged(order, added, places, oldest, alive, slots))
    into = np.full(len(order) + len(added) + 1, guard, np.uint32)
    progress = done, copied, size = 0, 0, 0
    for step in range(10_000):
        if done == len(added) and copied == len(order):
            break
        before = (done, copied)
        progress = done, copied, size = merge_some(
            order_array.ctypes.data, len(order), added_array.ctypes.data, len(added), np.array(places, np.int64),
            into.ctypes.data, (oldest, alive, slots), progress, budgets[step % len(budgets)],
        )  # fmt: skip
        assert (done, copied) > before
        assert (done - before[0]) + (copied - before[1]) <= budgets[step % len(budgets)] + 1
    assert size == expected_size
    # One position that is left out may be written after the end.
    assert set(into[size + 1 :].tolist()) <= {guard}
    return into[:size].tolist()


@given(st.data())
def test_merging_in_slices_keeps_the_order_and_removes_old_positions(data):
    slots = data.draw(st.integers(1, 60), "slots")
    everything = data.draw(st.permutations(range(slots)))
    cut = data.draw(st.integers(0, slots), "cut")
    order, added = everything[:cut], everything[cut:]
    places = sorted(data.draw(st.lists(st.integers(0, cut), min_size=len(added), max_size=len(added)), "places"))
    oldest, alive = data.draw(st.integers(0, slots - 1), "oldest"), data.draw(st.integers(0, slots), "alive")
    budgets = data.draw(st.lists(st.integers(1, 80), min_size=1, max_size=4), "budgets")
    merged = merged_by_kernel(order, added, places, oldest, alive, slots, budgets)
    assert merged == naive.merged(order, added, places, oldest, alive, slots)


@given(st.lists(st.sampled_from([1, 2, naive.SEPARATOR]), min_size=1, max_size=40), st.data())
def test_usable_positions_follow_a_token(slots, data):
    first = data.draw(st.integers(0, len(slots) - 1))
    size = data.draw(st.integers(0, len(slots)))
    # As in a ring, the last slot is repeated before slot 0.
    buffer = array([slots[-1], *slots])
    positions = np.zeros(size, np.uint32)
    count = usable_positions(buffer.ctypes.data + 4, first, size, len(slots), positions.ctypes.data)
    expected = [(first + index) % len(slots) for index in range(size)]
    assert positions[:count].tolist() == [slot for slot in expected if slots[slot - 1] != naive.SEPARATOR]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no affinity")
def test_only_processors_that_the_process_may_run_on_count():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_processors() == {min(before)}
    finally:
        os.sched_setaffinity(0, before)


def test_all_processors_count_without_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert usable_processors() == {0, 1, 2}
