"""The index of one request: tokens added at once, in steps, and over the turns of a session."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ssd import DrafterConfig, SuffixDrafter
from ssd.corpus.corpus import Corpus
from ssd.sequences import local_index as local
from ssd.sequences.local_index import FRESH_ROOM, LocalIndex
from tests import naive
from tests.replay import progress_of
from tests.ssd.addresses import uint32_at
from tests.strategies import ALPHABETS, array, examples, tokens

DEPTHS = st.sampled_from([1, 4, 32])


def orders_of(index):
    """Return the positions in the large and in the small suffix array."""
    _, large, small = index.addresses
    return uint32_at(large, index.sorted_size).tolist(), uint32_at(small, index.fresh_size).tolist()


def keys_of(index, text, depth):
    """Return the keys of all positions, sorted."""
    return sorted(naive.key(text, position, depth) for order in orders_of(index) for position in order)


def assert_indexes(index, text, depth):
    """Check that its sorted suffix arrays contain each position between two tokens once, and nothing else."""
    assert index.tokens.tolist() == list(text)
    address, _, _ = index.addresses
    assert uint32_at(address - 4, 1 + len(text)).tolist() == [naive.SEPARATOR, *text]
    orders = orders_of(index)
    assert sorted(position for order in orders for position in order) == list(range(1, len(text)))
    for order in orders:
        keys = [naive.key(text, position, depth) for position in order]
        assert keys == sorted(keys)


def new_index(text, depth):
    index = LocalIndex(depth)
    index.extend(array(text))
    return index


@given(st.lists(tokens(max_size=40), max_size=6), DEPTHS)
@example([[]], 32)
@example([[9]], 32)
@example([[7] * 50, [7] * 10], 4)
def test_text_in_pieces_is_indexed_like_the_whole_text(pieces, depth):
    index, text = LocalIndex(depth), []
    for piece in pieces:
        index.extend(array(piece))
        text += piece
        assert_indexes(index, text, depth)
    assert keys_of(index, text, depth) == keys_of(new_index(text, depth), text, depth)


def turns():
    """Generate the text of a conversation, and prompts that begin with a part of it."""
    return ALPHABETS.flatmap(
        lambda alphabet: st.tuples(
            st.lists(st.sampled_from(alphabet), max_size=60),
            st.lists(
                st.tuples(st.floats(0, 1), st.lists(st.sampled_from(alphabet), max_size=30)), min_size=1, max_size=4
            ),
        )
    )


@given(turns(), DEPTHS)
@example(([1, 2, 3], [(1.0, [])]), 32)  # the same prompt again
@example(([1, 2, 3], [(0.0, [])]), 32)  # an empty one
@example(([1, 2, 3, 4], [(0.5, [3, 9])]), 32)  # shares one more token than the drawn part
def test_a_turn_indexes_only_tokens_after_the_common_prefix(drawn, depth):
    text, prompts = drawn
    index = new_index(text, depth)
    sorted_sizes = []
    with pytest.MonkeyPatch.context() as patch:
        sort = local.sort_positions
        patch.setattr(local, "sort_positions", lambda *given: (sorted_sizes.append(given[2]), sort(*given)))
        for part, added in prompts:
            prompt = [*text[: int(part * len(text))], *added]
            shared = next(
                (at for at, pair in enumerate(zip(text, prompt, strict=False)) if pair[0] != pair[1]),
                min(len(text), len(prompt)),
            )
            sorted_sizes.clear()
            index.adopt(index.continue_with(array(prompt)).sort())
            assert sum(sorted_sizes) == len(range(max(1, shared), len(prompt)))
            text = prompt
            assert_indexes(index, text, depth)


@given(tokens(), st.integers(0, 60), DEPTHS)
def test_a_shortened_text_is_indexed_correctly(text, size, depth):
    index = new_index(text, depth)
    size = min(size, len(text))
    index.truncate(size)
    assert_indexes(index, text[:size], depth)


def test_growth_keeps_the_contents():
    index, text = LocalIndex(32), []
    for size in (1, 2, 700, 1000, 3, 5000):
        piece = np.random.default_rng(size).integers(0, 3, size).tolist()
        index.extend(array(piece))
        text += piece
        assert index.room >= len(text)
    assert_indexes(index, text, 32)
    assert index.nbytes >= 8 * len(text)


def test_memory_of_a_longer_text_is_released():
    text = np.random.default_rng(0).integers(0, 3, 50_000)
    index = new_index(text, 32)
    held = index.nbytes
    index.shrink()
    assert index.nbytes == held
    index.truncate(20_000)
    index.shrink()
    assert index.nbytes == held
    index.truncate(3000)
    index.shrink()
    assert index.nbytes < held / 10
    assert_indexes(index, text[:3000].tolist(), 32)
    index.extend(array(text[3000:6000]))
    assert_indexes(index, text[:6000].tolist(), 32)


def index_in(drafter, sequence_id):
    return drafter._sequences.local(drafter.running.rows_of([sequence_id])[0])


@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.integers(0, 80),
    st.lists(st.integers(0, 90), max_size=12),
    st.sampled_from([1, 32]),
)
@examples(40)
@example(0, 3, 5, [FRESH_ROOM - 1, 1, 1, 1, 2 * FRESH_ROOM, 0, 1], 32)
@example(0, 1, 0, [1, 0, 2, FRESH_ROOM], 32)
def test_tokens_of_single_steps_are_indexed_like_a_prompt(seed, kinds, prompt_size, steps, depth):
    text = np.random.default_rng(seed).integers(0, kinds, prompt_size + sum(steps)).astype(np.uint32)
    config = DrafterConfig(match_depth=depth)
    with SuffixDrafter(config, corpus=Corpus(config.capacity, depth)) as drafter:
        drafter.start(1, text[:prompt_size], session_id="s")
        at = prompt_size
        for size in steps:
            drafter.draft(progress_of({1: text[at : at + size]}, limit=size % 3))
            at += size
            assert_indexes(index_in(drafter, 1), text[:at].tolist(), depth)
        drafter.finish(1, text[at:])
        # The next turn begins with the prompt and the output.
        drafter.start(2, np.append(text, array([1, 2])), session_id="s")
        assert_indexes(index_in(drafter, 2), [*text.tolist(), 1, 2], depth)
