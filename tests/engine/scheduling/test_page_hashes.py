"""Hashes of pages: equal exactly where salt and everything up to the page's end are."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.page_hashes import PageHashes, page_hash, salt_hash

SIZE = 4
TEXTS = st.lists(st.integers(0, 1), min_size=SIZE, max_size=4 * SIZE)
SALTS = st.sampled_from(["", "a", "\ud800"])


def hashes_of(salt, text):
    tokens = np.array(text, np.uint32)
    hashes = PageHashes(salt)
    return [hashes.of(tokens, index, SIZE) for index in range(len(text) // SIZE)]


@given(SALTS, TEXTS, SALTS, TEXTS)
def test_names_are_equal_exactly_where_everything_before_is(salt, text, other_salt, other_text):
    for index, name in enumerate(hashes_of(salt, text)):
        for other_index, other in enumerate(hashes_of(other_salt, other_text)):
            end, other_end = (index + 1) * SIZE, (other_index + 1) * SIZE
            assert (name == other) == ((salt, text[:end]) == (other_salt, other_text[:other_end]))


def test_names_do_not_depend_on_the_order_in_which_they_are_asked_for():
    tokens = np.arange(40, dtype=np.uint32)
    hashes = PageHashes("")
    last = hashes.of(tokens, 9, SIZE)
    assert last == hashes_of("", range(40))[9]
    assert hashes.of(tokens[:8], 1, SIZE) == hashes_of("", range(8))[1]


def test_a_salt_cannot_pose_as_a_page():
    """Whoever chooses a salt as the bytes that another tenant's page is hashed from gets another name."""
    tokens = np.frombuffer(b"page" * SIZE, np.uint32)
    assert salt_hash("page" * SIZE) != page_hash(b"", tokens)
