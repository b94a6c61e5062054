from hypothesis import example, given
from hypothesis import strategies as st

from ssd import local
from ssd.local import LocalIndex
from tests import naive
from tests.strategies import array, tokens


@given(tokens(), st.integers(0, 60), st.integers(1, 6), st.sampled_from([1, 4, 32]))
@example([], 0, 1, 32)
@example([9], 1, 1, 32)
@example([7] * 50, 5, 3, 4)
def test_index_stays_sorted_and_finds_the_longest_match(text, prompt_length, chunk, depth):
    index = LocalIndex(array(text[:prompt_length]), depth)
    for start in range(prompt_length, len(text), chunk):
        index.extend(array(text[start : start + chunk]))
        seen = text[: start + chunk]
        assert index.order.tolist() == naive.local_order(seen, depth)
        match = index.match()
        positions, length = naive.longest_match(seen, seen, depth)
        assert match.length == length
        assert set(index.order[match.left : match.right].tolist()) == positions
    assert index.tokens.tolist() == text


@given(tokens(max_size=80, min_size=40), st.sampled_from([4, 32]))
def test_a_prompt_sorted_at_once_serves_like_one_that_was_inserted(text, depth):
    cut = len(text) - 5
    original, local.SORT_FROM = local.SORT_FROM, 16
    try:
        index = LocalIndex(array(text[:cut]), depth)
    finally:
        local.SORT_FROM = original
    index.extend(array(text[cut:]))
    keys = [naive.key(text, position, depth) for position in index.order.tolist()]
    assert keys == sorted(keys)
    assert sorted(index.order.tolist()) == list(range(1, len(text)))
    positions, length = naive.longest_match(text, text, depth)
    match = index.match()
    assert match.length == length
    assert set(index.order[match.left : match.right].tolist()) == positions
