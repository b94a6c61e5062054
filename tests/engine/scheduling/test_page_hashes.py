"""Hashes of pages are equal if and only if the salts, the adapters and the texts up to the page's end are equal."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.page_hashes import PageHashes, page_hash, salt_hash

SIZE = 4
TEXTS = st.lists(st.integers(0, 1), min_size=SIZE, max_size=4 * SIZE)
SALTS = st.sampled_from(["", "a", "\ud800"])


ADAPTERS = st.sampled_from([None, "", "a"])


def hashes_of(salt, text, adapter=None):
    tokens = np.array(text, np.uint32)
    hashes = PageHashes(salt, adapter)
    return [hashes.of(tokens, index, SIZE) for index in range(len(text) // SIZE)]


@given(SALTS, ADAPTERS, TEXTS, SALTS, ADAPTERS, TEXTS)
def test_hashes_are_equal_if_and_only_if_salt_adapter_and_prefix_are(
    salt, adapter, text, other_salt, other_adapter, other_text
):
    for index, own in enumerate(hashes_of(salt, text, adapter)):
        for other_index, other in enumerate(hashes_of(other_salt, other_text, other_adapter)):
            end, other_end = (index + 1) * SIZE, (other_index + 1) * SIZE
            is_same = (salt, adapter, text[:end]) == (other_salt, other_adapter, other_text[:other_end])
            assert (own == other) == is_same


def test_hashes_do_not_depend_on_the_order_of_queries():
    tokens = np.arange(40, dtype=np.uint32)
    hashes = PageHashes("")
    last = hashes.of(tokens, 9, SIZE)
    assert last == hashes_of("", range(40))[9]
    assert hashes.of(tokens[:8], 1, SIZE) == hashes_of("", range(8))[1]


def test_hashes_of_a_salt_and_of_a_page_with_the_same_bytes_differ():
    """A tenant cannot choose a salt whose hash is that of another tenant's page."""
    tokens = np.frombuffer(b"page" * SIZE, np.uint32)
    assert salt_hash("page" * SIZE) != page_hash(b"", tokens)
