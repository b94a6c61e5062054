"""Hypothesis strategies for tokens: small alphabets, so that text repeats, and the largest ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

LARGEST = 0xFFFF_FFFE

TOKEN_SETS = [(7,), (0, 1), (0, 1, 2), (3, 255, 256, 65_536, LARGEST), tuple(range(40))]
ALPHABETS = st.sampled_from(TOKEN_SETS)


def examples(number: int) -> settings:
    """Set the number of examples of a slow test, scaled by the profile's number of examples."""
    profile = settings.get_profile("project").max_examples
    return settings(max_examples=max(1, number * settings().max_examples // profile))


def assert_covered(seen: Counter, events: Iterable[object], least: int) -> None:
    """Check that random histories had each event at least so often, unless the profile has fewer examples."""
    if settings().max_examples >= settings.get_profile("project").max_examples:
        assert min(seen[event] for event in events) >= least, seen


def tokens(max_size: int = 60, min_size: int = 0) -> st.SearchStrategy[list[int]]:
    """Generate tokens over one alphabet."""
    return ALPHABETS.flatmap(lambda alphabet: st.lists(st.sampled_from(alphabet), min_size=min_size, max_size=max_size))


def requests(max_size: int = 8) -> st.SearchStrategy[list[list[int]]]:
    """Generate requests over one alphabet, which may be empty."""
    return ALPHABETS.flatmap(
        lambda alphabet: st.lists(st.lists(st.sampled_from(alphabet), max_size=20), max_size=max_size)
    )


def corpus_and_context() -> st.SearchStrategy[tuple[list[list[int]], list[int]]]:
    """Generate requests and a context over one alphabet."""
    return ALPHABETS.flatmap(
        lambda alphabet: st.tuples(
            st.lists(st.lists(st.sampled_from(alphabet), max_size=20), max_size=8),
            st.lists(st.sampled_from(alphabet), max_size=50),
        )
    )


def array(values: list[int]) -> np.ndarray:
    """Return token ids as uint32 [N]."""
    return np.array(values, np.uint32)
