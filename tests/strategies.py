"""Hypothesis strategies for tokens: small alphabets, so that things repeat, and the largest ids there are."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

LARGEST = 0xFFFF_FFFE

ALPHABETS = st.sampled_from([(7,), (0, 1), (0, 1, 2), (3, 255, 256, 65_536, LARGEST), tuple(range(40))])


def examples(number: int) -> settings:
    """So many examples of a test that is slow, and in proportion more where the profile asks for more."""
    profile = settings.get_profile("project").max_examples
    return settings(max_examples=max(1, number * settings().max_examples // profile))


def tokens(max_size: int = 60, min_size: int = 0) -> st.SearchStrategy[list[int]]:
    """A run of tokens over one alphabet."""
    return ALPHABETS.flatmap(lambda alphabet: st.lists(st.sampled_from(alphabet), min_size=min_size, max_size=max_size))


def requests(max_size: int = 8) -> st.SearchStrategy[list[list[int]]]:
    """Requests over one alphabet, empty ones among them."""
    return ALPHABETS.flatmap(
        lambda alphabet: st.lists(st.lists(st.sampled_from(alphabet), max_size=20), max_size=max_size)
    )


def corpus_and_context() -> st.SearchStrategy[tuple[list[list[int]], list[int]]]:
    """Requests, and a context over the same alphabet."""
    return ALPHABETS.flatmap(
        lambda alphabet: st.tuples(
            st.lists(st.lists(st.sampled_from(alphabet), max_size=20), max_size=8),
            st.lists(st.sampled_from(alphabet), max_size=50),
        )
    )


def array(values: list[int]) -> np.ndarray:
    """As the packages take tokens."""
    return np.array(values, np.uint32)
