import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.client import history
from drafter_service.client.history import TokenHistory, indices_of_runs
from ssd.types import offsets_of
from tests.strategies import array, examples

ROWS = 5

steps = st.lists(
    st.tuples(
        st.dictionaries(st.integers(0, ROWS - 1), st.lists(st.integers(0, 99), max_size=12), max_size=ROWS),
        st.sampled_from(["append", "append", "fold", "tokens", "last", "clear"]),
        st.integers(0, 9),
    ),
    max_size=20,
)


@pytest.fixture(scope="module", autouse=True)
def small_tables():
    """Make the tables so small that they fill up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "TAIL", 10)
        patch.setattr(history, "FOLD_EVERY", 3)
        yield


def added(runs):
    """Return the arguments of `append`."""
    tokens = np.concatenate([np.empty(0, np.uint32), *(array(run) for run in runs.values())])
    return np.array(list(runs), np.int64), tokens, offsets_of(np.array([len(run) for run in runs.values()], np.int64))


@examples(100)
@given(steps)
def test_tokens_are_those_that_were_appended(batches):
    kept, naive = TokenHistory(), {row: [] for row in range(ROWS)}
    kept.grow(2)
    kept.grow(ROWS)
    for runs, action, number in batches:
        kept.append(*added(runs))
        for row, run in runs.items():
            naive[row] += run
        row = number % ROWS
        if action == "fold":
            kept.fold_if_due()
        elif action == "tokens":
            assert kept.tokens(row).tolist() == naive[row]
        elif action == "clear":
            kept.clear(row)
            naive[row] = []
        elif action == "last":
            counts = [min(number, len(naive[row])) for row in runs]
            last = kept.last(np.array(list(runs), np.int64), offsets_of(np.array(counts, np.int64)).astype(np.int64))
            expected = [naive[row][len(naive[row]) - count :] for row, count in zip(runs, counts, strict=True)]
            assert last.tolist() == [token for run in expected for token in run]
    assert [kept.tokens(row).tolist() for row in range(ROWS)] == list(naive.values())
    assert kept.sizes(np.arange(ROWS)).tolist() == [len(text) for text in naive.values()]


def test_tokens_are_copied():
    kept = TokenHistory()
    kept.grow(1)
    tokens, offsets = array([1, 2]), array([0, 2])
    kept.append(np.array([0]), tokens, offsets)
    tokens[:] = offsets[:] = 9
    assert kept.tokens(0).tolist() == [1, 2]


def test_indices_of_runs():
    assert indices_of_runs(np.array([7, 0, 3]), np.array([0, 2, 2, 5])).tolist() == [7, 8, 3, 4, 5]
