"""What drafters of tokens are told equals a slow twin's, for random sequences and steps."""

import numpy as np
import pytest

from engine.drafters import reports
from engine.drafters.reports import COUNTS, NOT_STARTED, copy_tokens, note_step, report
from engine.scheduling.table import COLUMNS, LENGTH, MAX_DRAFT, SEQUENCE_ID, TEXT

ROWS = 6


def random_state(rng):
    """Return texts, their rows of the table and what was reported of them."""
    texts = [rng.integers(0, 99, rng.integers(1, 20)).astype(np.uint32) for _ in range(ROWS)]
    state, reported = np.zeros((ROWS, COLUMNS), np.int64), np.zeros((ROWS, 3), np.int64)
    for row, text in enumerate(texts):
        state[row, [SEQUENCE_ID, TEXT, LENGTH, MAX_DRAFT]] = 100 + row, text.ctypes.data, len(text), rng.integers(3)
        reported[row] = rng.integers(NOT_STARTED, len(text) + 1), rng.integers(3), rng.integers(5)
    return texts, state, reported


def naive_report(texts, state, reported, rows, rooms):
    """Return the fields of each sequence's progress, and update `reported`."""
    found = []
    for index, row in enumerate(rows):
        known, steps, verified = reported[row].tolist()
        if known != NOT_STARTED and state[row, MAX_DRAFT] > 0:
            found.append((index, 100 + row, texts[row][known:].tolist(), verified, rooms[index], steps))
            reported[row] = len(texts[row]), 0, 0
    return found


def naive_note_step(reported, rows, produced, verified):
    for row, tokens, drafted in zip(rows, produced, verified, strict=True):
        if tokens and reported[row, 0] != NOT_STARTED:
            reported[row] = reported[row, 0], reported[row, 1] + 1, reported[row, 2] if reported[row, 1] else drafted


def check(seed, run=report, note=note_step):
    rng = np.random.default_rng(seed)
    texts, state, reported = random_state(rng)
    twin = reported.copy()
    rows = rng.permutation(ROWS)[: rng.integers(1, ROWS + 1)]
    for _ in range(2):
        produced, verified = rng.integers(0, 3, (2, len(rows)))
        note(reported, rows, produced, verified)
        naive_note_step(twin, rows, produced, verified)
        assert np.array_equal(reported, twin)
    rooms = rng.integers(0, 9, len(rows))
    (at, addresses), ids = np.empty((2, len(rows)), np.int64), np.empty(len(rows), np.uint64)
    counts = np.empty((COUNTS, len(rows) + 1), np.uint32)
    count, most = run(state, reported, rows, rooms, at, ids, addresses, counts)
    expected = naive_report(texts, state, twin, rows.tolist(), rooms.tolist())
    offsets = counts[reports.OFFSETS, : count + 1]
    tokens = np.empty(offsets[-1], np.uint32)
    copy_tokens(addresses[:count], offsets, tokens)
    runs = [run.tolist() for run in np.split(tokens, offsets[1:-1])]
    numbers = np.vstack((at[:count], ids[:count], *counts[reports.OWN_VERIFIED :, :count])).astype(int).T.tolist()
    assert [(*own[:2], run, *own[2:]) for own, run in zip(numbers, runs[:count], strict=True)] == expected
    assert most == max((one[-1] for one in expected), default=0)
    assert np.array_equal(reported, twin)


@pytest.mark.parametrize("seed", range(60))
def test_reports_equal_their_twin(seed):
    check(seed)


def test_the_twin_detects_tokens_that_are_reported_twice():
    def repeats(state, reported, *rest):
        before = reported.copy()
        result = report(state, reported, *rest)
        reported[:] = before
        return result

    with pytest.raises(AssertionError):
        [check(seed, repeats) for seed in range(60)]
