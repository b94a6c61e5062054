"""Prompt tokens that a prefix cache does not have."""

from hypothesis import given
from hypothesis import strategies as st

from drafter_service.commands.advise.traffic import PAGE_SIZE
from tests.drafter_service.commands.advise.logs import traffic_of


@st.composite
def texts(draw):
    """Return token ids in pages of one token, so that texts share pages often, and a part of a page."""
    pages = draw(st.lists(st.integers(0, 1), max_size=4))
    return [token for token in pages for _ in range(PAGE_SIZE)] + [7] * draw(st.integers(0, 3))


def slow_uncached(requests):
    missing = 0
    for number, (prompt, output) in enumerate(requests):
        own = prompt + output
        shared = 0
        for earlier in (a + b for a, b in requests[:number]):
            same = next((at for at, (x, y) in enumerate(zip(own, earlier, strict=False)) if x != y), None)
            same = min(len(own), len(earlier)) if same is None else same
            shared = max(shared, same // PAGE_SIZE * PAGE_SIZE)
        missing += max(0, len(prompt) - shared)
    return missing


@given(st.lists(st.tuples(texts(), texts()), max_size=6), st.booleans())
def test_uncached_prompt_tokens_equal_the_slow_twin(requests, has_times):
    began = list(range(len(requests), 0, -1)) if has_times else None
    in_order = requests[::-1] if has_times else requests
    assert traffic_of(requests, began=began).uncached_prompt_tokens() == slow_uncached(in_order)
