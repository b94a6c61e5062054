"""The public behavior of the suffix drafter."""

import re
from dataclasses import fields, replace

import numpy as np
import pytest

from ssd import DrafterConfig, SuffixDrafter
from ssd.corpus import tier
from ssd.corpus.corpus import Corpus
from ssd.sequences.tables import MIN_ROWS
from ssd.types import DraftBatch, Path
from tests.replay import drafter_of, progress_of, replay_one
from tests.strategies import array

TEXT = np.random.default_rng(0).integers(0, 1000, 300).astype(np.uint32)


@pytest.fixture
def drafter():
    with drafter_of(cost=0.02) as drafter:
        yield drafter


def draft(drafter, sequence_id, tokens=(), limit=8, **outcome):
    return drafter.draft(progress_of({sequence_id: tokens}, limit, **outcome)).tokens.tolist()


def test_an_output_is_expected_to_begin_like_its_prediction(drafter):
    drafter.start(1, array([1, 2, 3]), hints=array([20, 21, 22, 23]))
    assert draft(drafter, 1)[:3] == [20, 21, 22]
    drafter.start(2, array([1, 2, 3]), hints=array([30, 31, 32, 33]))
    assert draft(drafter, 2, [30, 40])[:2] == [32, 33]
    # A sequence that began elsewhere may be anywhere in its prediction.
    drafter.start(3, array([1, 2, 3]), hints=array([50, 51, 52, 53]), committed=array([5]))
    assert draft(drafter, 3) == []


def test_a_large_batch_has_the_right_draft_for_each_sequence(drafter):
    many = range(200)
    assert len(many) > 10 * MIN_ROWS
    prompts = {number: [1000 + number, 2000 + number] * 3 for number in many}
    for number, prompt in prompts.items():
        drafter.start(number, array(prompt))
        if number == MIN_ROWS - 1:
            before = [draft(drafter, number, limit=4) for number in range(MIN_ROWS)]
    drafts = drafter.draft(progress_of(dict.fromkeys(many, ()), limit=4))
    assert [drafts.tokens_of(number).tolist() for number in many] == [prompts[number][:4] for number in many]
    # Drafts from before the tables grew are known.
    assert before == [prompts[number][:4] for number in range(MIN_ROWS)]
    progress = progress_of({number: prompts[number][:3] for number in many}, limit=2, verified=4)
    drafts = drafter.draft(progress)
    assert [drafts.tokens_of(number).tolist() for number in many] == [
        [prompts[number][1], prompts[number][0]] for number in many
    ]
    assert drafter.stats.accepted == 3 * len(many)
    for number in many:
        drafter.finish(number, array([]))
    assert drafter.running.offered() == {}
    drafter.corpus.refresh()
    assert drafter.corpus.tokens == len(many) * (6 + 3 + 1)


def test_rows_of_finished_sequences_are_reused(drafter):
    for number in range(10 * MIN_ROWS):
        drafter.start(number, array([1, number + 10]))
        assert draft(drafter, number) == []
        drafter.finish(number, array([]), learn=False)
    assert drafter.memory_bytes() < drafter_of().memory_bytes() * 2


def test_outputs_are_remembered_in_the_corpus_in_use(drafter):
    before, corpus = drafter.corpus, Corpus.from_config(drafter.config)
    drafter.start(1, array([1]))
    drafter.use_corpus(corpus)
    drafter.finish(1, array([2, 3]))
    assert (before.appended, corpus.appended) == (0, 3)


# Sessions


def test_a_shortened_session_releases_its_memory(drafter):
    without = drafter.memory_bytes()
    drafter.start(1, np.arange(100_000, dtype=np.uint32), session_id="chat")
    drafter.finish(1, array([1]), learn=False)
    assert drafter.memory_bytes() - without > 800_000
    drafter.start(2, array([0, 1, 2, 3, 0, 1]), session_id="chat")
    drafter.finish(2, array([2]), learn=False)
    assert drafter.memory_bytes() - without < 20_000
    drafter.start(3, array([0, 1, 2, 3, 0, 1, 2]), session_id="chat")
    assert draft(drafter, 3, limit=2) == [3, 0]


# Invalid input


def test_a_kept_exception_does_not_block_the_maintainer(drafter, monkeypatch):
    drafter.corpus.append(TEXT, "mine")
    drafter.corpus.refresh()
    drafter.start(1, array([5]))
    wrong = replace(progress_of({1: []}, limit=4), max_draft=np.array([4], np.int64))
    with pytest.raises(ValueError, match="max_draft") as kept_in_draft:
        drafter.draft(wrong)
    with pytest.raises(ValueError, match="offered 0 tokens") as kept_after_a_step:
        drafter.draft(progress_of({1: [2]}, limit=4, verified=1))
    with pytest.raises(ValueError, match="tokens") as kept_in_finish:
        drafter.finish(1, np.array([1, 2]))
    drafter.corpus.forget("mine")
    monkeypatch.setattr(tier, "READERS_LIMIT_S", 0.1)
    drafter.corpus.refresh()  # It would raise an error, because it waits for readers of the text.
    del kept_in_draft, kept_after_a_step, kept_in_finish


def test_capacity_and_match_depth_are_those_of_the_corpus():
    corpus = Corpus(10_000, 16)
    for config in (None, DrafterConfig(), DrafterConfig(capacity=10_000), DrafterConfig(match_depth=16)):
        drafter = SuffixDrafter(config, corpus=corpus)
        assert (drafter.config.capacity, drafter.config.match_depth) == (10_000, 16)
    with pytest.raises(ValueError, match="made with match_depth=16, not 8"):
        SuffixDrafter(DrafterConfig(match_depth=8), corpus=corpus)
    with pytest.raises(ValueError, match="made with capacity=10000, not 20000"):
        SuffixDrafter(DrafterConfig(capacity=20_000), corpus=corpus)


def test_a_list_of_tokens_can_be_drafted_for():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    with drafter_of([text] * 3, cost=0.001) as drafter:
        first = drafter.propose([1, 2, 3], max_draft=4)
        assert first.tokens.tolist() == [4, 5, 6, 7]
        assert (first.accept_prob > 0.5).all()
        # A longer context continues the last one, a shorter or another one does not.
        assert drafter.propose([1, 2, 3, 4, 5], max_draft=2).tokens.tolist() == [6, 7]
        assert (drafter.stats.verified, drafter.stats.accepted) == (4, 2)
        assert drafter.propose(array([1, 2, 3, 4]), max_draft=2).tokens.tolist() == [5, 6]
        assert len(drafter.propose([77, 78]).tokens) == 0
        assert len(drafter.propose([]).tokens) == 0
        assert drafter.stats.committed == 2
        drafter.corpus.refresh()
        assert drafter.corpus.requests == 3


def test_memory_includes_running_sequences_and_the_corpus(drafter):
    empty = drafter.memory_bytes()
    drafter.start(1, np.arange(100_000, dtype=np.uint32))
    running = drafter.memory_bytes()
    assert running - empty >= 8 * 100_000
    drafter.finish(1, array([1]), learn=False)
    assert drafter.memory_bytes() < running
    replay_one(drafter, 2, TEXT[:50], TEXT[50:])
    drafter.corpus.refresh()
    assert drafter.memory_bytes() >= empty + 8 * 250


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_draft", (0, 65)),
        ("match_depth", (0, 65)),
        *((name, (-1,)) for name in ("learned_prompt_tokens", "idle_sessions", "idle_tokens")),
        ("cost", (0.0, 1.5, float("nan"))),
        ("refresh_interval_s", (0, float("inf"), float("nan"))),
        ("draft_shape", ("bush",)),
    ],
)
def test_settings_out_of_range_are_named(name, values):
    for value in values:
        with pytest.raises(ValueError, match=name):
            DrafterConfig(**{name: value})


@pytest.mark.parametrize("name", [each.name for each in fields(DrafterConfig) if each.type == "int"])
def test_settings_that_are_not_integers_are_named(name):
    for value in ("16M", 1e4, True, None):
        with pytest.raises(ValueError, match=re.escape(f"{name} must be an integer, not {value!r}")):
            DrafterConfig(**{name: value})
    assert DrafterConfig(**{name: np.int64(getattr(DrafterConfig, name))}) == DrafterConfig()


def test_the_largest_settings_work():
    text = np.tile(TEXT, 2)
    with drafter_of([TEXT], max_draft=64, match_depth=64, cost=1e-12) as drafter:
        drafter.start(1, text[:400])
        assert draft(drafter, 1, limit=64) == text[400:464].tolist()


def test_drafts_are_scattered_among_sequences_without_any():
    paths = [Path(array([5, 6]), np.ones(2, np.float32)), Path(array([7]), np.ones(1, np.float32))]
    batch = DraftBatch.from_paths(paths).scatter(np.array([1, 3]), 5)
    assert [batch.tokens_of(index).tolist() for index in range(5)] == [[], [5, 6], [], [7], []]
    assert [batch.parents_of(index).tolist() for index in range(5)] == [[], [-1, 0], [], [-1], []]
