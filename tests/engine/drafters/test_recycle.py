"""Token Recycling: trees and tables against naive twins, and through the engine."""

import heapq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.drafters.recycle import EMPTY, RecycleDrafter, Successors, grow_trees, room_for
from engine.drafters.sources import DraftSource
from engine.engine import build_engine
from engine.scheduling.request import Request, SamplingParams
from ssd.acceptance import AcceptanceTable
from ssd.baselines.none import NoDrafter
from tests.engine.steps import each_of

CONFIG = EngineConfig(max_sequences=4, max_step_tokens=256, max_draft=9, draft_shape="tree")


def naive_tree(last, room, successors, probability, is_path):
    """(token, parent, accept_prob) of each node. probability: of (token, rank, depth)."""
    nodes, heap, counter = [], [], 0

    def expand(token, parent, depth, whole):
        nonlocal counter
        for rank, successor in enumerate(successors[token].tolist()):
            if successor == EMPTY:
                return
            own = probability(token, rank, depth)
            heapq.heappush(heap, (-whole * own, counter, (successor, parent, own, depth)))
            counter += 1

    expand(last, -1, 1, 1.0)
    while heap and len(nodes) < room:
        whole, _, (token, parent, own, depth) = heapq.heappop(heap)
        nodes.append((token, parent, own))
        if is_path:
            heap.clear()
        expand(token, len(nodes) - 1, depth + 1, -whole)
    return nodes


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.booleans())
def test_grown_trees_equal_those_of_a_heap(seed, is_path):
    rng = np.random.default_rng(seed)
    vocab, width, count, depths = int(rng.integers(2, 12)), int(rng.integers(1, 5)), int(rng.integers(1, 5)), 3
    successors = np.array([rng.permutation(max(vocab, width))[:width] for _ in range(vocab)], np.int64) % vocab
    for row in successors:
        row[rng.integers(0, width + 1) :] = EMPTY
    scores = rng.random((vocab, width)).astype(np.float32)
    edges = np.array([0.3, 0.6], np.float32)
    rates = rng.random((2 * depths, 3)).astype(np.float32)
    last, rooms = rng.integers(0, vocab, count), rng.integers(0, 12, count)
    is_sampled = rng.integers(0, 2, count)
    *nodes, lengths = room_for(rooms)
    table = Successors(successors, scores)
    total = grow_trees(last, rooms, is_sampled, table, edges, rates, is_path, *nodes, lengths)
    expected = []
    for index in range(count):

        def probability(token, rank, depth, index=index):
            row = is_sampled[index] * depths + min(depth, depths) - 1
            return float(rates[row, int((edges <= scores[token, rank]).sum())])

        expected.append(naive_tree(int(last[index]), int(rooms[index]), successors, probability, is_path))
    assert lengths.tolist() == [len(nodes) for nodes in expected]
    found = zip(*(column[:total].tolist() for column in nodes), strict=True)
    assert list(found) == [node for nodes in expected for node in nodes]


class NaiveTable:
    """The table of successors and the acceptance table, updated one token after the other."""

    def __init__(self, width):
        self.width = width
        self.rows = {}
        self.table = AcceptanceTable()

    def observe(self, result):
        learned = ([], [])
        for each in each_of(result):
            request, text = each.sequence.request, each.sequence.tokens.tolist()
            first = len(text) - len(each.tokens)
            for depth, position in enumerate(range(first, len(text)), start=1):
                for token, score in self.rows.get(text[position - 1], ()):
                    learned[request.sampling.is_sampled].append((score, depth, token == text[position]))
        for is_sampled, each in enumerate(learned):
            if each:
                self.table.observe(bool(is_sampled), *(np.array(column) for column in zip(*each, strict=True)))
        for wanted in (False, True):
            for each in each_of(result):
                self.update(each, wanted)

    def update(self, each, wanted):
        """Store the rows of rejected or of accepted tokens."""
        text = each.sequence.tokens
        inputs = [int(text[-len(each.tokens) - 1]), *each.draft.tolist()]
        accepted = {0, *(1 + each.kept).tolist()}
        for row, token in enumerate(inputs):
            if (row in accepted) == wanted:
                logits = each.top_logits[row].numpy()
                share = np.exp(logits - logits.max())
                share = share / share.sum()
                self.rows[token] = list(zip(each.top_tokens[row].tolist(), share.tolist(), strict=True))


class Checked(RecycleDrafter):
    """Compares the tables with the naive ones after every step."""

    def __init__(self, vocab_size, **how):
        super().__init__(vocab_size, **how)
        self.naive = NaiveTable(self.needs.top_k)
        self.steps = 0

    def observe(self, result):
        super().observe(result)
        assert len(result.top_tokens) == result.plan.producers + result.plan.verified
        for each in each_of(result):
            assert each.top_tokens.shape == each.top_logits.shape == (1 + each.drafted, self.needs.top_k)
            if not each.sequence.request.sampling.is_sampled and len(each.tokens) > each.accepted:
                assert each.top_tokens[np.append(0, 1 + each.kept)[-1], 0] == each.tokens[each.accepted]
        self.naive.observe(result)
        self.steps += 1
        known = np.flatnonzero(self._table.tokens[:, 0] != EMPTY)
        assert set(known.tolist()) == self.naive.rows.keys()
        for token in known.tolist():
            tokens, scores = zip(*self.naive.rows[token], strict=True)
            assert self._table.tokens[token].tolist() == list(tokens)
            np.testing.assert_allclose(self._table.scores[token], scores, rtol=1e-5)
        np.testing.assert_allclose(self._acceptance.rates, self.naive.table.rates, rtol=1e-5)


def requests(count, **given):
    rng = np.random.default_rng(4)
    sampling = {"max_tokens": 24, "ignore_eos": True, **given}
    prompts = [rng.integers(1, 40, rng.integers(1, 50)).astype(np.uint32) for _ in range(count)]
    return [
        Request(prompt, SamplingParams(seed=seed, **{"temperature": seed % 2, **sampling}))
        for seed, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("shape", ["path", "tree"])
@pytest.mark.parametrize("verification", ["exact", "rejection"])
def test_tables_equal_those_of_a_loop_and_outputs_those_without_drafts(model, shape, verification):
    submitted, config = requests(8), replace(CONFIG, draft_shape=shape, verification=verification)
    plain = build_engine(model, config, NoDrafter()).generate(submitted)
    drafter = Checked(model.config.vocab_size, has_trees=shape == "tree")
    sources = set()
    completions = build_engine(model, config, drafter).generate(
        submitted, lambda report: sources.update(report.arrays.drafted_sources.tolist())
    )
    assert [each.tokens.tolist() for each in completions] == [each.tokens.tolist() for each in plain]
    assert sum(each.accepted for each in completions) > 2
    assert sources == {DraftSource.RECYCLE}
    assert drafter.steps > 10


def test_successors_are_shared_between_requests(model):
    """A second run of the same greedy requests needs fewer steps."""
    submitted = requests(4, temperature=0)
    engine = build_engine(model, CONFIG, RecycleDrafter(model.config.vocab_size, has_trees=True))
    first, second = (sum(each.steps for each in engine.generate(submitted)) for _ in range(2))
    assert second < first


def test_small_vocabularies_have_fewer_successors():
    assert RecycleDrafter(3, has_trees=True).needs.top_k == 3


@pytest.mark.parametrize("learn", [False, True])
def test_only_requests_that_may_be_learned_change_the_table(model, learn):
    drafter = RecycleDrafter(model.config.vocab_size, has_trees=True)
    prompt = np.array([5, 6, 7], np.uint32)
    build_engine(model, CONFIG, drafter).generate([Request(prompt, SamplingParams(max_tokens=5), learn=learn)])
    assert (drafter._table.tokens != EMPTY).any() == learn
