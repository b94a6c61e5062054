from hypothesis import example, given
from hypothesis import strategies as st

from ssd.baselines.ngram import look_up
from tests import naive
from tests.strategies import array, tokens


@given(tokens(max_size=30), st.integers(0, 8))
@example([], 4)
@example([7] * 20, 8)
@example([1, 2, 1, 2], 8)
def test_look_up_is_prompt_lookup(text, limit):
    assert look_up(array(text), limit).tokens.tolist() == naive.ngram_draft(text, limit)
