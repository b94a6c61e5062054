"""Lookahead decoding: window and pool against naive twins, and through the engine."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.drafters.lookahead import LookaheadDrafter, NgramPool, Trees, Window
from engine.drafters.options import LookaheadOptions
from engine.drafters.sources import DraftSource
from engine.engine import build_engine
from engine.scheduling.request import Request, SamplingParams
from engine.speculation.draft_tree import DraftTree
from ssd.baselines.none import NoDrafter
from tests.curves import line
from tests.engine.forward import prompt_logits
from tests.engine.steps import each_of

CONFIG = EngineConfig(max_sequences=4, max_step_tokens=256, max_draft=12, draft_shape="tree")
SIZES = LookaheadOptions(window=4, ngram=4, candidates=3)


class NaiveWindow:
    """Guesses as a list of levels of columns; a token's context is found by following its column."""

    def __init__(self, sizes, text):
        self.sizes = sizes
        guesses = [text[-sizes.window :][index % len(text[-sizes.window :])] for index in range(sizes.window)]
        self.levels = [[text[-1], *guesses[1:]]]

    def rows(self, room):
        """Paths of the extra rows, from level 0, in order; the last element of each is the row's own token."""
        self.columns = min(self.sizes.window, (room + 1) // len(self.levels))
        return [
            self.path(level, column)
            for level in range(len(self.levels))
            for column in range(self.columns)
            if (level, column) != (0, 0)
        ]

    def path(self, level, column):
        return [*self.levels[0][1 : column + 1], *(self.levels[below][column] for below in range(1, level + 1))]

    def advance(self, after, committed):
        """after: of the path of a row, the target's next token."""
        ngrams, moved = [], 0
        top = len(self.levels) - 1
        if self.columns:
            new = [after(self.path(top, column)) for column in range(self.columns)]
            if len(self.levels) < self.sizes.ngram - 1:
                self.levels.append(new + [new[-1]] * (self.sizes.window - self.columns))
            else:
                for column in range(self.columns):
                    ngrams.append((*(level[column] for level in self.levels), new[column]))
                self.levels = [*self.levels[1:], new + self.levels[-1][self.columns :]]
                moved = 1
        shift = len(committed) - moved
        self.levels = [(level + [level[-1]] * shift)[shift : shift + self.sizes.window] for level in self.levels]
        self.levels[0][0] = committed[-1]
        return ngrams


def model_of(salt):
    """A function of the last three tokens of a text, with 10 tokens."""
    return lambda text: int(np.random.default_rng([salt, *text[-3:]]).integers(10))


@settings(max_examples=40)
@given(st.integers(0, 10**6))
def test_a_window_follows_its_naive_twin(seed):
    """Cases have any number of committed tokens, any room, and steps in which no extra rows run."""
    rng, predict = np.random.default_rng(seed), model_of(seed)
    sizes = LookaheadOptions(window=int(rng.integers(2, 7)), ngram=int(rng.integers(2, 6)), candidates=3)
    text = rng.integers(0, 10, rng.integers(1, 12)).tolist()
    window, naive = Window(sizes, np.array(text, np.uint32)), NaiveWindow(sizes, text)
    for _ in range(12):
        room = int(rng.choice([0, rng.integers(0, sizes.rows + 1), sizes.rows]))
        tokens, parents = window.rows(room)
        paths = naive.rows(room)
        assert len(tokens) == len(paths) <= max(room, 0)
        tree = DraftTree(parents)
        assert [tokens[sees].tolist() for sees in tree.sees] == paths
        extra = np.array([predict(text + path) for path in paths], np.uint32)
        committed = [predict(text)]
        while len(committed) < rng.integers(1, 5):
            committed.append(predict(text + committed))
        found = window.advance(committed[0], extra, np.array(committed, np.uint32))
        assert found == naive.advance(lambda path: predict(text + path), committed)  # noqa: B023
        text += committed


def test_rows_that_were_refused_leave_the_window_usable():
    window = Window(SIZES, np.arange(9, dtype=np.uint32))
    window.rows(SIZES.rows)
    assert window.advance(3, np.empty(0, np.uint32), np.array([3, 4], np.uint32)) == []
    tokens, _ = window.rows(SIZES.rows)
    assert len(tokens) == SIZES.window - 1


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=40), st.integers(1, 4))
def test_a_pool_has_the_most_recent_ngrams(ngrams, capacity):
    pool = NgramPool(capacity)
    pool.add(ngrams)
    for token in range(4):
        newest_first = dict.fromkeys(ngram for ngram in reversed(ngrams) if ngram[0] == token)
        assert pool.find(token) == list(newest_first)[:capacity]


def test_ngrams_share_the_nodes_of_common_prefixes():
    trees = Trees()
    trees.add([(9, 1, 2, 3), (9, 1, 4, 3), (9, 5, 2, 3)])
    trees.add([])
    trees.add([(8, 1, 1)])
    assert trees.tokens == [1, 2, 3, 4, 3, 5, 2, 3, 1, 1]
    assert trees.parents == [-1, 0, 1, 0, 3, -1, 5, 6, -1, 0]
    assert trees.depths == [1, 2, 3, 2, 3, 1, 2, 3, 1, 2]
    assert trees.scores == [1, 1, 1, 0.5, 1, 0.5, 1, 1, 1, 1]
    assert trees.lengths == [8, 0, 2]


def requests(count, **given):
    """Requests whose outputs have few different tokens, so that n-grams recur."""
    rng = np.random.default_rng(4)
    sampling = {"max_tokens": 32, "ignore_eos": True, "logit_bias": dict.fromkeys(range(1, 6), 30.0), **given}
    prompts = [rng.integers(1, 12, rng.integers(1, 40)).astype(np.uint32) for _ in range(count)]
    return [
        Request(prompt, SamplingParams(seed=seed, **{"temperature": seed % 2, **sampling}))
        for seed, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("shape", "max_step_tokens", "verification"),
    [("path", 256, "exact"), ("path", 64, "rejection"), ("tree", 64, "exact"), ("tree", 256, "rejection")],
)
def test_outputs_equal_those_without_drafts(model, shape, max_step_tokens, verification):
    """Some steps have room for few extra rows only."""
    config = replace(CONFIG, draft_shape=shape, max_step_tokens=max_step_tokens, verification=verification)
    submitted = requests(8)
    plain = build_engine(model, config, NoDrafter()).generate(submitted)
    drafter = LookaheadDrafter(SIZES, has_trees=shape == "tree")
    sources, extra = set(), set()

    def observe(report):
        for each in each_of(report.result):
            sources.update(each.sources.tolist())
            extra.add(len(each.extra_tokens))

    completions = build_engine(model, config, drafter).generate(submitted, observe)
    assert [each.tokens.tolist() for each in completions] == [each.tokens.tolist() for each in plain]
    assert sum(each.accepted for each in completions) > 5
    assert sources == {DraftSource.LOOKAHEAD}
    assert SIZES.rows in extra
    assert (len(extra) > 5) == (max_step_tokens == 64)


def test_drafts_are_those_of_the_naive_twin(model):
    """One greedy request: the draft of every step has the n-grams of the text and of the naive branch."""
    [submitted] = requests(1, temperature=0, max_tokens=24, logit_bias={})
    drafter, drafted = LookaheadDrafter(SIZES, has_trees=True), []
    engine = build_engine(model, CONFIG, drafter)

    def observe(report):
        for each in each_of(report.result):
            nodes = list(zip(each.draft.tolist(), each.draft_depths.tolist(), strict=True))
            drafted.append((nodes, each.room, each.tokens.tolist()))

    engine.generate([submitted], observe)

    def predict(text):
        return int(prompt_logits(model, np.array(text, np.uint32))[-1].argmax())

    text = submitted.prompt.tolist()
    naive, pool = NaiveWindow(SIZES, text), []
    pool += zip(*(text[first:] for first in range(SIZES.ngram)), strict=False)
    for nodes, room, committed in drafted:
        ngrams = list(dict.fromkeys(ngram for ngram in reversed(pool) if ngram[0] == text[-1]))[: SIZES.candidates]
        prefixes = {ngram[1:end] for ngram in ngrams for end in range(2, SIZES.ngram + 1)}
        expected = Counter((prefix[-1], len(prefix)) for prefix in prefixes)
        assert Counter(nodes) <= expected
        assert len(nodes) == min(room, len(prefixes))
        naive.rows(SIZES.rows)
        pool += naive.advance(lambda path: predict(text + path), committed)  # noqa: B023
        text += committed
        start = len(text) - len(committed) - SIZES.ngram + 1
        pool += zip(*(text[start + first :] for first in range(SIZES.ngram)), strict=False)
    assert len(drafted) > 5


@pytest.mark.parametrize(("slope", "pays"), [(1e-6, True), (0.3, False)])
def test_rows_that_cannot_pay_are_left_out(model, monkeypatch, slope, pays):
    monkeypatch.setattr("engine.executor.build.measured_curve", lambda *_, **__: line(slope, 4.0))
    submitted, said, extra = requests(8), [], set()

    def observe(report):
        extra.update(len(each.extra_tokens) for each in each_of(report.result))

    drafter = LookaheadDrafter(SIZES, has_trees=True)
    engine = build_engine(model, CONFIG, drafter, has_budget=True, warn=said.append)
    completions = engine.generate(submitted, observe)
    assert sum(each.drafted for each in completions) > 5, "n-grams of the text are drafted"
    assert (SIZES.rows in extra) == pays
    assert extra == {0} or pays
    assert len(said) == (not pays)
