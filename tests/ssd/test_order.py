from hypothesis import example, given

from ssd.order import forward_order, full_order
from tests import naive
from tests.naive import SEPARATOR
from tests.strategies import LARGEST, array, requests, tokens


@given(requests())
@example([])
@example([[5]])
@example([[7] * 20])
@example([[LARGEST, LARGEST - 1, LARGEST, LARGEST - 1]])
def test_full_order_sorts_by_what_stands_before(written):
    text = naive.ring_text(written, 1000)
    assert full_order(array(text)).tolist() == naive.full_order(text)


@given(requests())
def test_keys_behind_a_separator_are_left_out(written):
    text = naive.ring_text(written, 25)
    assert all(text[position - 1] != SEPARATOR for position in full_order(array(text)))


@given(tokens())
@example([])
def test_forward_order_is_the_suffix_array(text):
    assert forward_order(array(text)).tolist() == sorted(range(len(text)), key=lambda position: text[position:])
