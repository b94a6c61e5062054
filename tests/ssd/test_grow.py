import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ssd.grow import grow_path
from tests import naive
from tests.strategies import array, requests


def grow(text, positions, match_length, limit, min_path_odds, goes_on=False):
    tokens, odds = np.empty(limit, np.uint32), np.empty(limit, np.float32)
    size = grow_path(
        array(text), array(positions), len(positions), match_length, limit, min_path_odds, goes_on, tokens, odds
    )
    return tokens[:size].tolist(), odds[:size].tolist()


@given(requests(), st.data())
def test_growth_follows_the_most_frequent_continuation(written, data):
    text = naive.ring_text([*written, [1, 2, 3]], 1000)
    positions = data.draw(st.lists(st.integers(0, len(text) - 1), min_size=1, max_size=12, unique=True))
    arguments = (
        data.draw(st.integers(1, 40), "match length"),
        data.draw(st.integers(1, 8), "limit"),
        data.draw(st.sampled_from([0.0, 0.1, 0.5]), "min path odds"),
        data.draw(st.booleans(), "goes on"),
    )
    tokens, odds = grow(text, positions, *arguments)
    expected_tokens, expected_odds = naive.grow_path(text, positions, *arguments)
    assert tokens == expected_tokens
    assert odds == pytest.approx(expected_odds, abs=1e-6)


def test_of_equally_frequent_tokens_the_most_recent_wins():
    assert grow([1, 5, 1, 6], [1, 3], 4, 1, 0.0)[0] == [6]


def test_a_loop_is_drafted_beyond_the_end_of_what_was_seen():
    assert grow([1, 2, 3, 1], [1], 1, 8, 0.0, goes_on=True)[0] == [2, 3, 1, 2, 3, 1, 2, 3]
    assert grow([1, 2, 3, 1], [1], 1, 8, 0.0, goes_on=False)[0] == [2, 3, 1]


def test_a_draft_ends_where_requests_ended():
    assert grow([1, 2, naive.SEPARATOR, 9, 9], [1], 4, 5, 0.0)[0] == [2]


@given(st.floats(0.01, 0.9))
@example(0.1)
def test_the_whole_draft_keeps_the_odds_that_were_asked_for(min_path_odds):
    _, odds = grow(list(range(60)), [3], 4, 40, min_path_odds)
    assert np.prod(odds) >= min_path_odds * (1 - 1e-5)
