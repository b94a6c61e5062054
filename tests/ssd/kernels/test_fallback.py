"""Fallback candidates: counted tokens, their probabilities, and who may be offered them."""

import threading
from bisect import bisect
from itertools import islice

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.drafters.rest import RestDrafter
from ssd import DrafterConfig, SuffixDrafter
from ssd.corpus.corpus import Corpus
from ssd.kernels.arrays import allocate
from ssd.kernels.fallback import (
    MAX_COUNT,
    MAX_FOUND,
    SLOTS,
    SLOTS_WITHOUT_CONTEXT,
    FallbackTable,
    FoundFallbacks,
    find_fallbacks,
    learn_missed,
)
from ssd.kernels.learned import LearnedTables
from ssd.kernels.probabilities import FALLBACK_CELLS, MEAN, SEEN, SEEN_CAP
from ssd.kernels.step import Model
from ssd.sequences.tables import CANDIDATE_COLUMNS, KEPT
from ssd.types import ROOT, Source
from tests.replay import progress_of
from tests.strategies import array, examples

CAPACITY = 100_000
SECRET = 7777


def model_of(table, learned=None):
    return Model(learned or LearnedTables.new(), table.arrays)


def candidates_with(tokens):
    """Return the rows of the candidates of a node; only their tokens are used here."""
    candidates = np.zeros((KEPT, CANDIDATE_COLUMNS), np.int32)
    candidates[: len(tokens), 0] = sorted(tokens)
    return candidates


def count_all(table, events, known=(), learned=None, *, is_counted=True):
    """Learn from (text, token) events at nodes with the candidates `known`."""
    model, candidates = model_of(table, learned), candidates_with(known)
    for text, token in events:
        text = array(text)
        learn_missed(model, candidates, len(known), text.ctypes.data, len(text), np.uint32(token), is_counted)


class NaiveTable:
    """The same counts in lists: of each context, [token, count] in descending order of counts; and the same means."""

    def __init__(self, cells):
        self.contexts = {}
        self.cells = cells.astype(np.float64)

    def count(self, text, token):
        for size in range(3):
            if len(text) <= size:
                continue
            key, room = self.key(text, size)
            entries = self.contexts.setdefault(key, [])
            known = [entry for entry in entries if entry[0] == token]
            if not known and len(entries) == room:
                entries.pop()
            old = known[0][1] if known else 0
            entries[:] = [entry for entry in entries if entry[0] != token]
            at = next((at for at, entry in enumerate(entries) if entry[1] <= old + 1), len(entries))
            entries.insert(at, [token, old + 1])
            if old + 1 > MAX_COUNT:
                entries[:] = [[token, (count + 1) // 2] for token, count in entries]

    def key(self, text, size):
        return (size, *text[-1 - size : -1]), SLOTS if size else SLOTS_WITHOUT_CONTEXT

    def cells_of(self, text, size, known):
        """Return (token, cell) of the first 8 tokens of a context other than `known`."""
        entries = self.contexts.get(self.key(text, size)[0], []) if len(text) > size else []
        total = sum(count for _, count in entries[:SLOTS])
        others = [entry for entry in entries if entry[0] not in known]
        return [
            (
                token,
                FALLBACK_CELLS + ((size * 8 + rank) * 4 + bisect([2, 4, 8], count)) * 4 + min(3, 4 * count // total),
            )
            for rank, (token, count) in enumerate(islice(others, 8))
        ]

    def learn(self, text, token, known, *, is_counted):
        for size in range(3):
            for other, cell in self.cells_of(text, size, known):
                seen = self.cells[cell, SEEN] + 1
                self.cells[cell, MEAN] += ((other == token) - self.cells[cell, MEAN]) / seen
                self.cells[cell, SEEN] = min(seen, SEEN_CAP)
        if is_counted:
            self.count(text, token)

    def candidates(self, text, known, left, least):
        """Return the probabilities of at most MAX_FOUND tokens other than `known`."""
        found = {}
        for size in (2, 1, 0):
            for token, cell in self.cells_of(text, size, known):
                prob = left * self.cells[cell, MEAN]
                if prob < least:
                    break
                if token in found or len(found) < MAX_FOUND:
                    found[token] = max(prob, found.get(token, 0.0))
        total = sum(found.values())
        return {token: prob * min(1.0, left / total) for token, prob in found.items()}


def events():
    texts = st.lists(st.integers(1, 4), min_size=1, max_size=5)
    return st.lists(st.tuples(texts, st.integers(1, 60)), max_size=120)


@given(
    events(),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.sets(st.integers(1, 60), max_size=4),
    st.sampled_from([0.0, 0.02]),
    st.booleans(),
)
@example([([text, 2, 4], 20 * text + each) for text in (1, 3) for each in range(8)], [1, 2, 4], set(), 0.0, True)
@example([([1], token) for token in (5, 5, 5, 6)], [1], set(), 0.0, True)  # exactly three quarters
@example([([3], 5)] * 10 + [([3], 6)] * (MAX_COUNT + 1), [3], set(), 0.0, True)  # counts are halved
@examples(100)
def test_candidates_and_means_are_those_of_a_naive_table(events, text, known, least, is_counted):
    # The contexts of four tokens have different hashes.
    table, learned = FallbackTable(0.0), LearnedTables.new()
    learned.cells[FALLBACK_CELLS:, MEAN] = np.random.default_rng(0).random(len(learned.cells) - FALLBACK_CELLS)
    naive = NaiveTable(learned.cells)
    half = len(events) // 2
    for part, may_count in ((events[:half], True), (events[half:], is_counted)):
        count_all(table, part, known, learned, is_counted=may_count)
        for before, token in part:
            naive.learn(before, token, known, is_counted=may_count)
    np.testing.assert_allclose(learned.cells, naive.cells, atol=1e-4)
    found = candidates_of(table, text, known, 0.7, learned, least)
    assert found == pytest.approx(naive.candidates(text, known, 0.7, least), rel=1e-3)


def candidates_of(table, text, known, left, learned, least=0.0):
    """Return the fallback candidates of a node with the other candidates `known`, and their probabilities."""
    found, text = allocate(FoundFallbacks), array(text)
    left, least = np.float32(left), np.float32(least)
    model = model_of(table, learned)
    count = find_fallbacks(found, model, candidates_with(known), len(known), text.ctypes.data, len(text), left, least)
    return dict(zip(found.tokens[:count].tolist(), found.probs[:count].tolist(), strict=True))


def replay_surprises(drafter, steps, tokens):
    """Commit one of three tokens after each of many tokens that occur once, so that there is no evidence."""
    rng = np.random.default_rng(0)
    drafter.start(1, array([1]))
    for step in range(steps):
        drafter.draft(progress_of({1: [1000 + step]}, limit=8, cost=1e-6))
        drafter.draft(progress_of({1: [int(rng.choice(tokens))]}, limit=0))


def drafter_on(corpus, **config):
    return SuffixDrafter(DrafterConfig(capacity=CAPACITY, draft_shape="tree", **config), corpus=corpus)


@pytest.mark.parametrize(("cost", "drafted"), [(0.2, {5, 6, 7}), (0.3, set())])
def test_candidates_with_too_large_a_sum_are_drafted_if_they_are_worth_verifying_after_the_reduction(cost, drafted):
    with drafter_on(Corpus(CAPACITY, 32)) as drafter:
        count_all(drafter.corpus.fallback, [([1], 5), ([1], 6), ([1], 7)])
        drafter.corpus.learned.cells[FALLBACK_CELLS:, MEAN] = 0.9
        drafter.start(1, array([1]))
        # The threshold is 1.5 times the cost at first.
        drafts = drafter.draft(progress_of({1: []}, limit=8, cost=cost))
        assert {*drafts.tokens.tolist()} == drafted
        assert drafts.accept_prob.tolist() == pytest.approx([1 / 3] * len(drafted), abs=0.01)


def test_the_text_after_a_fallback_candidate_is_searched_for():
    corpus = Corpus(CAPACITY, 32)
    for request in ([1, 2, 3, 4, 5, 6], [9, 50, 60, 61]):
        corpus.append(array(request))
    corpus.refresh()
    count_all(corpus.fallback, [([1, 2, 3], 50)])
    with drafter_on(corpus) as drafter:
        drafter.start(1, array([1, 2, 3]))
        drafts = drafter.draft(progress_of({1: []}, limit=16, cost=1e-6))
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(drafts.parents.tolist(), drafts.tokens.tolist(), strict=True))
    }
    node = children[ROOT, 50]
    assert drafts.source[node] == Source.FALLBACK
    assert drafts.source[children[node, 60]] == Source.CORPUS
    assert (children[ROOT, 4], 5) in children
    # The samples of its parent do not agree with it.
    assert (node, 5) not in children


@pytest.mark.parametrize(("tokens", "is_counted"), [([1, SECRET], True), ([1, 2, SECRET], False)])
def test_tokens_after_the_last_node_of_a_full_draft_are_not_counted(tokens, is_counted):
    corpus = Corpus(CAPACITY, 32)
    with drafter_on(corpus) as drafter:
        drafter.start(1, array([1, 2, 3] * 20))
        assert drafter.draft(progress_of({1: []}, limit=2)).tokens.tolist() == [1, 2]
        drafter.draft(progress_of({1: tokens}, limit=0, verified=2))
        assert (SECRET in counted_tokens(corpus)) == is_counted


def counted_tokens(corpus):
    return {*corpus.fallback.arrays.slots[:, 0].tolist()} - {0}


def test_counted_tokens_are_removed_by_age_only_if_some_are_older():
    now = 1000.0
    corpus = Corpus(CAPACITY, 32, lambda: now)
    with drafter_on(corpus) as drafter:
        replay_surprises(drafter, 20, [5, 6, SECRET])
        now += 60
        drafter.forget_older_than(100)
        corpus.refresh()
        assert SECRET in counted_tokens(corpus)
        drafter.forget_older_than(30)
        corpus.refresh()
        assert counted_tokens(corpus) == set()
        assert corpus.fallback.since == now


@pytest.mark.parametrize("committed", [[], [2, 3]])
def test_the_first_output_token_is_removed_and_given_tokens_were_never_counted(committed):
    corpus = Corpus(CAPACITY, 32)
    with drafter_on(corpus) as drafter:
        count_all(corpus.fallback, [([1, 2, 3], 5), ([], 3), ([1], 3)])
        before = corpus.fallback.arrays.slots.copy()
        drafter.start(1, array([1, 2, 3][: 3 - len(committed)]), committed=array(committed))
        drafter.draft(progress_of({1: []}, limit=0))
        drafter.draft(progress_of({1: []}, limit=8))
        drafter.draft(progress_of({1: [SECRET]}, limit=0))
        assert SECRET in counted_tokens(corpus)
        drafter.finish(1, array([]), learn=False)
        counted = corpus.fallback.arrays.slots
        assert (counted[counted[:, 1] > 0] == before[before[:, 1] > 0]).all()


def test_counts_that_are_removed_leave_the_others_in_order():
    table = FallbackTable(0.0)
    count_all(table, [([3], 5)] * 3 + [([3], 6)] * 2 + [([3], 7)])
    table.remove_output(array([3, 5, 5, 7]), 1)
    # One context of no token, and contexts that were never counted.
    assert table.arrays.slots[:2].tolist() == [[6, 2], [5, 1]]
    assert not table.arrays.slots[2:, 1].any()


@pytest.mark.parametrize("change", ["erase", "remove_output", "draft"])
def test_whoever_changes_the_tables_of_a_corpus_waits_for_the_lock(change):
    corpus = Corpus(CAPACITY, 32)
    with drafter_on(corpus) as drafter:
        drafter.start(1, array([1, 2, 3]))
        drafter.draft(progress_of({1: []}, limit=1))
        lock, text = corpus.fallback.arrays.lock, array([1, 2, 3, 4])
        count_all(corpus.fallback, [([1, 2, 3], 4)])
        before = corpus.fallback.arrays.slots.copy()
        act = {
            "erase": lambda: corpus.fallback.erase(0.0),
            "remove_output": lambda: corpus.fallback.remove_output(text, 3),
            "draft": lambda: drafter.draft(progress_of({1: [9]}, limit=0)),
        }[change]
        waiting = threading.Thread(target=act, daemon=True)
        lock[0] = 1
        waiting.start()
        waiting.join(0.1)
        has_waited = waiting.is_alive() and (corpus.fallback.arrays.slots == before).all()
        lock[0] = 0
        waiting.join(60)
        assert has_waited
        assert not waiting.is_alive()
        assert (corpus.fallback.arrays.slots != before).any()
        assert lock[0] == 0


def test_a_drafter_that_does_not_publish_counts_nothing():
    corpus = Corpus(CAPACITY, 32)
    with RestDrafter(DrafterConfig(capacity=CAPACITY, draft_shape="tree"), corpus) as drafter:
        replay_surprises(drafter, 30, [5, 6, 7])
        assert counted_tokens(corpus) == set()
