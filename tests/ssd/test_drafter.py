import numpy as np
import pytest

from ssd import DrafterConfig, SuffixDrafter
from ssd.draft import ROOT, Source
from tests.replay import progress_of, replay_one
from tests.strategies import array

TEXT = np.random.default_rng(0).integers(0, 1000, 300).astype(np.uint32)


@pytest.fixture
def drafter():
    with SuffixDrafter(DrafterConfig(capacity=10_000, refresh_interval_s=1000)) as drafter:
        yield drafter


@pytest.mark.parametrize("policy", ["suffix", "article"])
def test_a_repeated_request_takes_far_fewer_steps(policy):
    with SuffixDrafter(DrafterConfig(capacity=10_000, policy=policy, refresh_interval_s=1000)) as drafter:
        first = replay_one(drafter, 1, TEXT[:50], TEXT[50:])
        drafter.corpus.refresh()
        second = replay_one(drafter, 2, TEXT[:50], TEXT[50:])
    assert first > 200
    assert second <= 20


def test_the_running_request_drafts_from_itself(drafter):
    drafter.start(1, array([1, 2, 3, 4, 5, 1, 2, 3]))
    drafts = drafter.draft(progress_of({1: []}, limit=3))
    assert drafts.tokens.tolist() == [4, 5, 1]
    assert drafts.parents.tolist() == [ROOT, 0, 1]
    assert set(drafts.source.tolist()) == {Source.LOCAL}
    assert ((drafts.odds > 0) & (drafts.odds <= 1)).all()


def test_the_longer_match_wins(drafter):
    replay_one(drafter, 1, array([1, 2, 3, 4]), array([9, 9]))
    drafter.corpus.refresh()
    drafter.start(2, array([2, 3, 7, 1, 2, 3, 4]))
    drafts = drafter.draft(progress_of({2: []}, limit=1))
    assert drafts.tokens.tolist() == [9]
    assert drafts.source.tolist() == [Source.CORPUS]


def test_a_batch_keeps_its_order(drafter):
    drafter.start(1, array([1, 2, 1]))
    drafter.start(2, array([8]))
    drafter.start(3, array([5, 6, 5]))
    drafts = drafter.draft(progress_of({3: [], 2: [], 1: []}, limit=1))
    assert [drafts.tokens_of(index).tolist() for index in range(3)] == [[6], [], [2]]


def test_what_was_not_to_be_learned_is_not_drafted(drafter):
    drafter.start(1, array([1, 2, 3]))
    drafter.finish(1, array([4, 5]), learn=False)
    drafter.corpus.refresh()
    assert drafter.corpus.tokens == 0


def test_only_the_end_of_a_prompt_is_remembered():
    config = DrafterConfig(capacity=1000, learned_prompt_tokens=2, refresh_interval_s=1000)
    with SuffixDrafter(config) as drafter:
        drafter.start(1, array([1, 2, 3, 4]))
        drafter.finish(1, array([5, 6]))
        drafter.corpus.refresh()
        assert drafter.corpus.view.text.tolist()[:-1] == [3, 4, 5, 6]


def test_drafts_respect_both_limits():
    config = DrafterConfig(capacity=1000, max_draft=3, min_path_odds=0.0, refresh_interval_s=1000)
    with SuffixDrafter(config) as drafter:
        drafter.start(1, array([1, 2, 3, 4, 5, 6, 1, 2]))
        assert len(drafter.draft(progress_of({1: []}, limit=9)).tokens) == 3
        assert len(drafter.draft(progress_of({1: []}, limit=2)).tokens) == 2
        assert len(drafter.draft(progress_of({1: []}, limit=0)).tokens) == 0


def test_the_same_requests_give_the_same_drafts():
    def run():
        drafts = []
        with SuffixDrafter(DrafterConfig(capacity=500, refresh_interval_s=1000)) as drafter:
            rng = np.random.default_rng(1)
            for sequence_id in range(30):
                drafter.start(sequence_id, rng.integers(0, 5, 20).astype(np.uint32))
                drafts.append(drafter.draft(progress_of({sequence_id: []}, limit=8)).tokens.tolist())
                drafter.finish(sequence_id, rng.integers(0, 5, 20).astype(np.uint32))
                drafter.corpus.refresh()
        return drafts

    assert run() == run()


def test_counters_add_up(drafter):
    steps = replay_one(drafter, 1, TEXT[:50], TEXT[50:])
    drafter.corpus.refresh()
    steps += replay_one(drafter, 2, TEXT[:50], TEXT[50:])
    stats = drafter.stats
    assert stats.steps == steps
    assert stats.committed == 2 * len(TEXT[50:])
    assert stats.committed == stats.accepted + stats.steps  # each step adds one token to what it accepts
    assert stats.accepted <= stats.verified
    assert sum(stats.verified_at) == stats.verified
    assert sum(stats.accepted_at) == stats.accepted
    assert sum(tally.drafts for tally in stats.by_match_length.values()) == stats.hits
    assert stats.by_source[Source.CORPUS].accepted > 200
    assert stats.summary()["tokens_per_step"] > 1


def test_an_empty_batch_is_no_error(drafter):
    assert len(drafter.draft(progress_of({}, limit=4))) == 0


@pytest.mark.parametrize(
    "setting",
    [
        {"max_draft": 0},
        {"samples": 0},
        {"match_depth": 0},
        {"learned_prompt_tokens": -1},
        {"min_path_odds": 1.5},
        {"refresh_interval_s": 0},
        {"refresh_interval_s": float("inf")},
        {"policy": "best"},
    ],
)
def test_settings_out_of_range_are_named(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        DrafterConfig(**setting)
