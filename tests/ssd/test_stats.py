"""Counters of drafted and accepted tokens."""

from dataclasses import replace

import numpy as np
import pytest

from ssd import ClassicDrafter, DrafterConfig, Rollout, SuffixDrafter
from ssd.stats import (
    ACCEPTED,
    COUNT,
    MAX_VERSIONS,
    OBSERVED,
    PREDICTED,
    PROB_BINS,
    VERIFIED,
    Stats,
    VersionTotals,
)
from ssd.types import Source
from tests.replay import drafter_of, progress_of, replay_one
from tests.strategies import array

TEXT = np.random.default_rng(0).integers(0, 1000, 300).astype(np.uint32)


@pytest.mark.parametrize("shape", ["path", "tree"])
def test_counters_add_up(shape):
    with drafter_of(draft_shape=shape) as drafter:
        steps = replay_one(drafter, 1, TEXT[:50], TEXT[50:])
        drafter.corpus.refresh()
        steps += replay_one(drafter, 2, TEXT[:50], TEXT[50:])
        stats = drafter.stats
        counters = stats.counters
        assert stats.steps == steps
        assert stats.committed == 2 * len(TEXT[50:])
        assert stats.committed == stats.accepted + stats.steps  # each step adds one token to what it accepts
        assert 200 < stats.accepted <= stats.verified
        assert 0 < stats.hits <= stats.steps
        calibration, own = counters.calibration, counters.by_source[[Source.CORPUS, Source.LOCAL]]
        for table in (counters.by_source, counters.by_position, calibration[:, [COUNT, OBSERVED]]):
            assert table.sum(axis=0).tolist() == [stats.verified, stats.accepted]
            assert (table[:, ACCEPTED] <= table[:, VERIFIED]).all()
        assert counters.by_age.sum(axis=0).tolist() == own.sum(axis=0).tolist(), "fallback candidates have no age"
        assert counters.by_source[Source.CORPUS, ACCEPTED] > 200
        # The mean path probability of a bin is in the bin's range.
        used = np.flatnonzero(calibration[:, COUNT])
        means = calibration[used, PREDICTED] / calibration[used, COUNT] * PROB_BINS
        assert ((means >= used - 1e-3) & (means <= used + 1 + 1e-3)).all()


def test_tokens_are_counted_by_source_position_and_age():
    with drafter_of([[1, 2, 3, 4, 5, 6, 7, 8, 9]] * 3, cost=0.001) as drafter:
        drafter.start(1, array([1, 2, 3, 4]))
        drafts = drafter.draft(progress_of({1: []}, limit=3))
        assert drafts.tokens.tolist() == [5, 6, 7]
        # The target accepts two of the three.
        drafter.draft(progress_of({1: [5, 6, 0]}, limit=0, verified=3))
        counters = drafter.stats.counters
        assert counters.by_source[Source.CORPUS].tolist() == [3, 2]
        assert counters.by_position[:4].tolist() == [[1, 1], [1, 1], [1, 0], [0, 0]]
        # Each token is followed by 3 to 10 of the 30 tokens, separators included: ages of 2 to 4 bits.
        assert counters.by_age[2:5].sum(axis=0).tolist() == [3, 2]
        assert counters.calibration[:, PREDICTED].sum() == pytest.approx(np.cumprod(drafts.accept_prob).sum(), rel=1e-4)


def test_tokens_of_several_steps_are_counted():
    with drafter_of([[1, 2, 3, 4, 5, 6]] * 3, cost=0.001) as drafter:
        drafter.start(1, array([1, 2]))
        drafter.start(2, array([7]))
        drafter.draft(progress_of({1: [], 2: []}, limit=3))
        before = drafter.stats.steps, drafter.stats.committed
        progress = progress_of({1: [3, 4, 9, 9], 2: [8]}, limit=3)
        drafter.draft(replace(progress, steps=np.array([3, 1], np.uint32), verified=np.array([2, 0], np.uint32)))
        assert (drafter.stats.steps - before[0], drafter.stats.committed - before[1]) == (4, 5)
        assert (drafter.stats.hits, drafter.stats.verified, drafter.stats.accepted) == (1, 2, 2)
        with pytest.raises(ValueError, match="steps has 1 elements"):
            drafter.draft(replace(progress_of({1: [], 2: []}, limit=3), steps=np.array([1], np.uint32)))


def test_paths_of_other_drafters_are_counted_by_position():
    stats = Stats()
    stats.record_path(committed=3, verified=4, accepted=2)
    stats.record_path(committed=3, verified=0, accepted=0, steps=3)
    assert (stats.steps, stats.committed, stats.hits, stats.verified, stats.accepted) == (4, 6, 1, 4, 2)
    assert stats.counters.by_position[:5].tolist() == [[1, 1], [1, 1], [1, 0], [1, 0], [0, 0]]


def totals_of(stats):
    return np.array([stats.steps, stats.committed, stats.verified, stats.accepted])


@pytest.mark.parametrize("kind", [SuffixDrafter, ClassicDrafter])
def test_rollouts_are_counted_by_version_when_they_end(kind):
    with kind(DrafterConfig(capacity=1 << 16)) as drafter:

        def replayed(number, **options):
            """Return what a request adds to the statistics."""
            before = totals_of(drafter.stats)
            replay_one(drafter, number, TEXT[:50], TEXT[50:], **options)
            drafter.corpus.refresh()
            return [1, *(totals_of(drafter.stats) - before).tolist()]

        first = replayed(0, rollout=Rollout("a", 7))
        others = [replayed(number, rollout=Rollout("a", 8), learn=False) for number in (1, 2)]
        assert others[0][4] > first[4]
        replayed(3)
        drafter.start(4, TEXT[:50], rollout=Rollout("a", 9))
        drafter.draft(progress_of({4: TEXT[50:52]}, limit=0))
        counted = {version: list(totals[:5]) for version, totals in drafter.stats.by_version.items()}
        assert counted == {7: first, 8: np.sum(others, axis=0).tolist()}


def test_the_versions_that_ended_last_are_kept():
    stats = Stats()
    for moment, version in enumerate([*range(1000, 2000), *range(30, 0, -1), 1000]):
        stats.record_version(version, VersionTotals(1, 5, 9, 6, 4, ended_at=moment))
        assert len(stats.by_version) <= MAX_VERSIONS
    assert set(stats.by_version) == {*range(1, MAX_VERSIONS), 1000}
    assert stats.by_version[1000].requests == 1, "it was forgotten in between"


def test_totals_of_versions_are_added():
    total, one, other = Stats(), Stats(), Stats()
    one.record_version(3, VersionTotals(1, 5, 9, 6, 4, ended_at=2.0))
    other.record_version(3, VersionTotals(2, 7, 8, 1, 1, ended_at=1.0))
    other.record_version(4, VersionTotals(1, 1, 1))
    for stats in (one, other):
        total.add(stats)
    assert total.by_version == {3: VersionTotals(3, 12, 17, 7, 5, ended_at=2.0), 4: VersionTotals(1, 1, 1)}
