"""Ends of outputs equal those found character by character."""

from hypothesis import example, given
from hypothesis import strategies as st

from engine.sampling.stopping import Cut, Stopping
from engine.scheduling.request import FinishReason, Request, SamplingParams
from tests.engine import naive_sampling as naive
from tests.strategies import array

PIECES = ["a", "b", "ab", "ba", "aab", "", "c", "bcb"]
stops = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


def decode(tokens):
    return "".join(PIECES[token] for token in tokens.tolist())


def stopping_of(eos=(), prompt=(1, 2), **settings):
    return Stopping(Request(array(prompt), SamplingParams(**settings)), eos, decode)


@given(st.lists(st.integers(0, 7), max_size=20), stops, st.integers(0, 4), st.data())
@example([4, 2], ["abc", "b"], 0, None)
def test_stop_strings_equal_a_loop_over_characters(tokens, stop, min_tokens, data):
    """Tokens are appended in steps of any size, as accepted drafts are."""
    text, found, used = naive.stopped([PIECES[token] for token in tokens], stop, min_tokens)
    stopping = stopping_of(stop=tuple(stop), min_tokens=min_tokens)
    left, taken, cut = array(tokens), 0, Cut(0)
    while len(left) and cut.reason is None:
        size = data.draw(st.integers(1, len(left))) if data else len(left)
        cut = stopping.cut(left[:size], 1000)
        taken += cut.length
        left = left[size:]
    assert (stopping.text(), cut.stop_reason, taken) == (text, found, used)
    assert (cut.reason is FinishReason.STOP) == (found is not None)


def test_end_tokens_stop_tokens_and_length():
    tokens = array([3, 5, 6, 7])
    assert stopping_of(eos=(5,)).cut(tokens, 9) == Cut(2, FinishReason.STOP)
    assert stopping_of(eos=(5,), ignore_eos=True).cut(tokens, 9) == Cut(4)
    assert stopping_of(eos=(6,), stop_token_ids=(5,)).cut(tokens, 9) == Cut(2, FinishReason.STOP, 5)
    assert stopping_of(eos=(5,), stop_token_ids=(5,), ignore_eos=True).cut(tokens, 9) == Cut(2, FinishReason.STOP, 5)
    assert stopping_of().cut(tokens, 4) == Cut(4, FinishReason.LENGTH)
    assert stopping_of(stop_token_ids=(7,)).cut(tokens, 4) == Cut(4, FinishReason.STOP, 7)


def test_stop_strings_that_begin_in_the_prompt_are_ignored():
    stopping = stopping_of(prompt=(0, 1), stop=("ab", "bc"))
    assert stopping.cut(array([6]), 9) == Cut(1)
    assert stopping.text() == "c"


def test_the_text_excludes_the_end_token():
    stopping = stopping_of(eos=(6,), stop=("zz",))
    assert stopping.cut(array([0, 6]), 9).reason is FinishReason.STOP
    assert stopping.text() == "a"
