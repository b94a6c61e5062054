"""The index of one request: tokens added at once, in steps, and over the turns of a session."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ssd import DrafterConfig, SuffixDrafter
from ssd.corpus.corpus import Corpus
from ssd.sequences import local_index as local
from ssd.sequences.local_index import FRESH_ROOM, LocalIndex
from tests import naive
from tests.replay import progress_of
from tests.ssd.addresses import uint32_at
from tests.strategies import ALPHABETS, array, examples

DEPTHS = st.sampled_from([1, 4, 32])


def orders_of(index):
    """Return the positions in the large and in the small suffix array."""
    _, large, small = index.addresses
    return uint32_at(large, index.sorted_size).tolist(), uint32_at(small, index.fresh_size).tolist()


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


class LocalIndexMachine(RuleBasedStateMachine):
    """An index whose text grows, is cut, and continues in turns of a session."""

    @initialize(depth=DEPTHS, alphabet=ALPHABETS)
    def begin(self, depth, alphabet):
        self.index, self.depth, self.alphabet, self.text = LocalIndex(depth), depth, alphabet, []

    def tokens(self, data):
        return data.draw(st.lists(st.sampled_from(self.alphabet), max_size=40))

    @rule(data=st.data(), repeats=st.sampled_from([1, 1, 1, 30]))
    def extend(self, data, repeats):
        piece = self.tokens(data) * repeats
        self.index.extend(array(piece))
        self.text += piece
        assert self.index.room >= len(self.text)

    @rule(share=st.floats(0, 1))
    def truncate(self, share):
        self.text = self.text[: int(share * len(self.text))]
        self.index.truncate(len(self.text))

    @rule()
    def shrink(self):
        self.index.shrink()

    @rule(data=st.data(), share=st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    def take_a_turn(self, data, share):
        """Begin with a part of the text; only tokens after the common prefix are sorted."""
        prompt, sorted_sizes = [*self.text[: int(share * len(self.text))], *self.tokens(data)], []
        pairs = zip(self.text, prompt, strict=False)
        most = min(len(self.text), len(prompt))
        shared = next((at for at, (one, other) in enumerate(pairs) if one != other), most)
        with pytest.MonkeyPatch.context() as patch:
            sort = local.sort_positions
            patch.setattr(local, "sort_positions", lambda *given: (sorted_sizes.append(given[2]), sort(*given)))
            self.index.adopt(self.index.continue_with(array(prompt)).sort())
        assert sum(sorted_sizes) == len(range(max(1, shared), len(prompt)))
        self.text = prompt

    @invariant()
    def the_text_is_indexed(self):
        assert_indexes(self.index, self.text, self.depth)
        assert self.index.nbytes >= 8 * len(self.text)


TestLocalIndex = LocalIndexMachine.TestCase
TestLocalIndex.settings = settings(examples(60), stateful_step_count=12)


def test_memory_of_a_longer_text_is_released():
    text = np.random.default_rng(0).integers(0, 3, 50_000)
    index = LocalIndex(32)
    index.extend(array(text))
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
