"""Matches in tiers, and samples of them, compared with slow references."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ssd.corpus.rollout import NO_TAG, TAGGED
from ssd.kernels.arrays import allocate
from ssd.kernels.evidence import (
    BLOCK_BITS,
    GROWTH,
    LIBRARY_FROM,
    NO_LIVE_TIER,
    ROUNDS,
    Evidence,
    SearchedText,
    gather,
    gather_libraries,
)
from ssd.kernels.jit import outline
from ssd.kernels.match import END, FIRST, REACH, SPAN_COLUMNS, TIER_COLUMNS, place_all, place_spans
from ssd.kernels.probabilities import LEVELS, OF_LIBRARIES, SAMPLES
from tests import naive
from tests.ssd.addresses import Text
from tests.strategies import ALPHABETS, LARGEST, array, corpus_and_context, examples

BLOCK = 1 << BLOCK_BITS
US, OTHERS = 7, 8


@outline
def write_evidence(evidence, tiers, live, owners, libraries, context, end, depth, tag, tags, live_tags):
    """Gather the evidence for the tokens before `end` of a context, for the owner US."""
    spans = np.empty((len(tiers) + len(libraries), SPAN_COLUMNS), np.int64)
    source = SearchedText(tiers, spans[: len(tiers)], live, owners, US, tag, tags, live_tags)
    gather(evidence, 0, source, context, end, depth)
    unowned = SearchedText(libraries, spans[len(tiers) :], NO_LIVE_TIER, owners, US, NO_TAG, tags, live_tags)
    gather_libraries(evidence, 0, unowned, context, end, depth)


class Tiers:
    """Texts with suffix arrays over some of their positions; the last one may be the live tier."""

    def __init__(self, tiers, depth, owners=None):
        self.texts = [Text(text) for text, _ in tiers]
        self.orders = [
            array(sorted(positions, key=lambda position: naive.key(text, position, depth))) for text, positions in tiers
        ]
        self.depth = depth
        self.owners = np.array(owners or [OTHERS], np.int64)
        self.live = -1 if owners is None else len(tiers) - 1

    def table(self, newest=0, slots=0):
        """int64 [tiers, TIER_COLUMNS], the argument of kernels."""
        rows = [
            (text.address, order.ctypes.data, len(order), newest, slots)
            for text, order in zip(self.texts, self.orders, strict=True)
        ]
        return np.array(rows, np.int64).reshape(-1, TIER_COLUMNS)

    def gather(self, context, newest=0, slots=0, tag=NO_TAG, tags=(NO_TAG,), live_tags=(NO_TAG,), libraries=None):
        """Return the levels of evidence, each (length, total, [(tier, position, age)]).

        libraries: `Tiers` of libraries, whose tiers are numbered after the own ones.
        """
        text, evidence = Text(context), allocate(Evidence, searches=1)
        write_evidence(
            evidence,
            self.table(newest, slots),
            self.live,
            self.owners,
            np.empty((0, TIER_COLUMNS), np.int64) if libraries is None else libraries.table(),
            text.address,
            len(context),
            self.depth,
            tag,
            np.array(tags, np.uint16),
            np.array(live_tags, np.uint16),
        )
        self.second = int(evidence.second[0])
        texts = [*self.texts, *(() if libraries is None else libraries.texts)]
        return [
            (
                int(evidence.lengths[0, level]),
                int(evidence.totals[0, level]),
                [
                    (*_place_of(texts, evidence.addresses[0, level, index]), int(evidence.ages[0, level, index]))
                    for index in range(evidence.counts[0, level])
                ],
            )
            for level in range(LEVELS)
            if evidence.counts[0, level]
        ]


def _place_of(texts, address):
    for tier, text in enumerate(texts):
        position = (int(address) - text.address) // 4
        if 0 <= position < len(text.tokens):
            return tier, position
    pytest.fail(f"the address {address} is outside all texts")


def split(text, owner_of, tiers):
    """Divide the usable positions of a text among tiers over it."""
    usable = naive.usable_positions(text)
    return [(text, [position for position in usable if owner_of[position] % tiers == tier]) for tier in range(tiers)]


def assert_found(found, expected):
    """Check the levels' lengths and totals, and that samples are different occurrences of their match."""
    assert [(length, total) for length, total, _ in found] == [(length, len(places)) for length, places in expected]
    for (_, total, samples), (_, places) in zip(found, expected, strict=True):
        sampled = {(tier, position) for tier, position, _ in samples}
        assert len(sampled) == len(samples) == min(total, SAMPLES)
        assert sampled <= {*places}


@given(corpus_and_context(), st.sampled_from([1, 3, 32]), st.integers(1, 3), st.randoms(use_true_random=False))
@example(([], [1, 2]), 32, 1, None)
@example(([[1]], [1]), 32, 1, None)
@example(([[1, 2, 3]], []), 32, 1, None)
@example(([[1, 2], [3, 4]], [2, 3]), 32, 1, None)  # no match crosses from one request into the next
@example(([[7] * 20], [7] * 50), 32, 1, None)
@example(([[1, 2]], [9, 8, 7, 6, 5, 4, 3, 1]), 32, 1, None)  # a context longer than the corpus
@example(([[LARGEST, 0, LARGEST]], [LARGEST]), 32, 1, None)
def test_all_occurrences_of_the_longest_matches_are_found_in_any_tiers(corpus, depth, tiers, random):
    requests, context = corpus
    text = naive.concatenated(requests)
    tier_of = [random.randrange(tiers) if random else 0 for _ in text]
    parts = split(text, tier_of, tiers)
    found = Tiers(parts, depth).gather(context)
    expected = naive.levels(parts, context, depth, rounds=ROUNDS, growth=GROWTH, most=LEVELS)
    assert_found(found, expected)


@outline
def place_each_way(tiers, contexts, depth):
    """Return the spans of all contexts, found in one batch and one by one."""
    together = np.full((len(contexts), len(tiers), SPAN_COLUMNS), -7, np.int64)
    apart = np.zeros((len(contexts), len(tiers), SPAN_COLUMNS), np.int64)
    place_all(tiers, together, contexts, depth)
    for index in range(len(contexts)):
        if contexts[index, 1] > 0:
            place_spans(tiers, apart[index], contexts[index, 0], contexts[index, 1], depth)
    return together, apart


@given(corpus_and_context(), st.sampled_from([1, 3, 32]), st.integers(1, 4), st.randoms(use_true_random=False))
@example(([], [1, 2]), 32, 2, None)
@examples(100)
def test_a_batched_search_agrees_with_single_searches(corpus, depth, tiers, random):
    requests, context = corpus
    text = naive.concatenated(requests)
    tier_of = [random.randrange(tiers) if random else 0 for _ in text]
    table = Tiers(split(text, tier_of, tiers), depth)
    around = Text(context)
    contexts = np.array([(around.address, end) for end in range(len(context) + 1)], np.int64)
    together, apart = place_each_way(table.table(), contexts, depth)
    assert together.tolist() == apart.tolist()
    assert not together[0, :, FIRST : END + 1].any()


def live_blocks():
    """Generate blocks of the live tier with owners, a finished request, and a context, over one alphabet."""
    return ALPHABETS.flatmap(
        lambda alphabet: st.tuples(
            st.lists(
                st.tuples(st.sampled_from([US, OTHERS]), st.lists(st.sampled_from(alphabet), max_size=30)), max_size=5
            ),
            st.lists(st.sampled_from(alphabet), max_size=20),
            st.lists(st.sampled_from(alphabet), max_size=40),
        )
    )


def naive_occurrences(tiers, context, length):
    return {
        (tier, position)
        for tier, (text, positions) in enumerate(tiers)
        for position in positions
        if naive.common_length(text, position, context, len(context), length) == length
    }


@given(live_blocks())
@examples(100)
def test_a_sequences_own_running_output_is_left_out(drawn):
    blocks, request, context = drawn
    live, positions = [], []
    for tokens in (tokens for _, tokens in blocks):
        positions += [len(live) + position for position in range(2, 1 + len(tokens))]
        live += [naive.SEPARATOR, *tokens] + [naive.SEPARATOR] * (BLOCK - 1 - len(tokens))
    owners = [owner for owner, _ in blocks]
    finished = naive.concatenated([request])
    texts = [(finished, naive.usable_positions(finished)), (live, positions)]
    found = Tiers(texts, 32, [*owners, OTHERS]).gather(context, newest=len(finished) - 1, slots=len(finished) + 1)
    of_others = [texts[0], (live, [position for position in positions if owners[position // BLOCK] == OTHERS])]
    if US not in owners:
        assert_found(found, naive.levels(texts, context, 32, rounds=ROUNDS, growth=GROWTH, most=LEVELS))
    for length, total, samples in found:
        assert all((age < 0) == (tier == 1) for tier, _, age in samples)
        expected = naive_occurrences(of_others, context, length)
        sampled = {(tier, position) for tier, position, _ in samples}
        assert sampled <= expected
        if len(naive_occurrences(texts, context, length)) <= SAMPLES:
            assert sampled == expected
            assert total == len(expected)


@pytest.mark.parametrize("size", [SAMPLES - 1, SAMPLES, SAMPLES + 1, REACH - 5, REACH, REACH + 1, 3 * REACH])
def test_samples_are_spread_evenly_up_to_the_reach(size):
    text, reached = [1] * (size + 1), min(size, REACH)
    tiers = Tiers([(text, range(1, size + 1))], 1)
    [(length, total, samples)] = tiers.gather([1])
    order = tiers.orders[0].tolist()
    places = sorted(order.index(position) for _, position, _ in samples)
    assert (length, total, len(places)) == (1, reached, min(size, SAMPLES))
    if size <= REACH:
        steps = np.diff(places)
        assert steps.max() - steps.min() <= 1
        assert places[0] + size - 1 - places[-1] <= steps.max()


def test_an_age_is_the_number_of_later_tokens_around_the_ring():
    text = naive.concatenated([[5, 1], [5, 2], [5, 3]])
    tiers = Tiers([(text, naive.usable_positions(text))], 32)
    # The newest token is in slot 4; the slots after it were written before slot 0.
    [(_, _, samples)] = tiers.gather([5], newest=4, slots=len(text))
    assert {position: age for _, position, age in samples} == {1: 3, 4: 0, 7: 6}


@given(
    st.lists(
        st.tuples(st.sampled_from([NO_TAG, 5, 7, 5 + 256]), st.lists(st.integers(0, 2), max_size=TAGGED - 1)),
        max_size=12,
    ),
    st.lists(st.integers(0, 2), max_size=10),
)
@example([(5, [1] * (TAGGED - 1))] * 2, [1])  # more occurrences than samples
@examples(200)
def test_the_second_level_of_a_group_is_its_longest_match_and_newest_samples(blocks, context):
    """Each request has a block of its own, so that each position has the tag of its request."""
    text, tags = [], [tag for tag, _ in blocks]
    for _, tokens in blocks:
        text += [naive.SEPARATOR, *tokens] + [naive.SEPARATOR] * (TAGGED - 1 - len(tokens))
    usable = naive.usable_positions(text)
    found = Tiers([(text, usable)], 32).gather(context, newest=len(text) - 1, slots=len(text), tag=5, tags=tags or [0])
    everything = naive.levels([(text, usable)], context, 32, rounds=1, growth=1, most=1)
    assert_found(found[:1], everything)
    own = [position for position in usable if tags[position // TAGGED] & 255 == 5]
    matches = {length: naive_occurrences([(text, own)], context, length) for length in range(1, len(context) + 1)}
    lengths = [length for length, places in matches.items() if places]
    if not lengths:
        assert len(found) < LEVELS
        return
    length, total, samples = found[1]
    assert (length, total) == (max(lengths), len(matches[max(lengths)]))
    newest = sorted((position for _, position in matches[length]), reverse=True)[:SAMPLES]
    assert sorted((position for _, position, _ in samples), reverse=True) == newest


@given(
    corpus_and_context(),
    st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=6),
    st.integers(1, 3),
    st.sampled_from([1, 3, 32]),
    st.randoms(use_true_random=False),
)
@example(([[1, 2]], [1, 2]), [[1, 2]], 1, 32, None)  # equally long
@example(([], [1, 2]), [[1, 2]], 1, 32, None)
@example(([], [0, 2]), [[1, 2]], 1, 32, None)  # too short
@examples(200)
def test_a_match_in_libraries_that_is_not_shorter_is_the_second_level(corpus, library, tiers, depth, random):
    requests, context = corpus
    text, written = naive.concatenated(requests), naive.concatenated(library)
    parts = split(written, [random.randrange(tiers) if random else 0 for _ in written], tiers)
    own = Tiers([(text, naive.usable_positions(text))], depth)
    alone = own.gather(context)
    found = own.gather(context, libraries=Tiers(parts, depth))
    levels = naive.levels(parts, context, depth, rounds=1, growth=1, most=1)
    longest = alone[0][0] if alone else 0
    if not levels or levels[0][0] < max(longest, LIBRARY_FROM):
        assert found == alone
        assert own.second != OF_LIBRARIES
        return
    assert found[:-1] == alone[:1]
    assert own.second == OF_LIBRARIES
    # The libraries' tiers are numbered after the only one of the corpus.
    length, total, samples = found[-1]
    assert_found([(length, total, [(tier - 1, *rest) for tier, *rest in samples])], levels)
