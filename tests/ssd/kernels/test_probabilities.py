"""That odds become what happens. The checks are statistical; each is shown to fail where learning is broken."""

import copy
import math

import numba
import numpy as np
import pytest

from ssd import DrafterConfig, SuffixDrafter
from ssd.corpus.corpus import Corpus
from ssd.kernels.probabilities import (
    CELL_COUNT,
    CHANCE,
    SAMPLES,
    SEEN,
    SEEN_CAP,
    SHARE_BUCKET,
    SHARE_BUCKETS,
    LearnedTables,
    chance_of,
    learn_cell,
    logit,
)
from ssd.stats import COUNT
from tests.replay import progress_of
from tests.strategies import array

CHANCES = (0.95, 0.8, 0.5, 0.2)
CAPACITY = 100_000


@numba.njit(error_model="numpy")
def taught(cells, logits, happened, cap):
    """What a cell says of each of many events before it learns of it."""
    said = np.empty(len(happened), np.float32)
    for index in range(len(happened)):
        said[index] = cells[0, CHANCE]
        learn_cell(cells, logits, 0, happened[index], np.float32(cap))
    return said


@numba.njit(error_model="numpy")
def bounced(chance):
    """To a logit and back."""
    return chance_of(logit(chance))


class Cell:
    """A table of one cell."""

    def __init__(self):
        self.cells, self.logits = np.full((1, 2), 0.5, np.float32), np.zeros(1, np.float32)

    def teach(self, happened):
        return taught(self.cells, self.logits, np.asarray(happened, np.float32), SEEN_CAP)

    @property
    def chance(self):
        return float(self.cells[0, CHANCE])


@pytest.mark.parametrize("chance", [0.02, 0.3, 0.9])
def test_a_cell_comes_to_the_chance_of_what_it_is_taught(chance):
    cell = Cell()
    said = cell.teach(np.random.default_rng(0).random(4000) < chance)
    # A mean of the last SEEN_CAP events, or so: within three standard errors.
    error = 3 * math.sqrt(chance * (1 - chance) / SEEN_CAP)
    assert abs(cell.chance - chance) < error
    assert abs(said[1000:].mean() - chance) < error
    assert cell.cells[0, SEEN] == SEEN_CAP
    assert cell.logits[0] == pytest.approx(math.log(cell.chance / (1 - cell.chance)), abs=0.01)


def test_a_cell_begins_by_believing_what_it_sees_and_ends_by_following_slowly():
    cell = Cell()
    first = cell.teach([1, 1, 1])
    assert first[0] == pytest.approx(0.5)
    assert first[1] > 0.8
    cell.teach([1] * 1000)
    assert cell.chance > 0.99
    cell.teach([0])
    assert cell.chance == pytest.approx(1 - 1 / SEEN_CAP, abs=0.01)
    cell.teach([0] * (5 * int(SEEN_CAP)))
    assert cell.chance < 0.02


def test_logits_are_bounded_and_go_back():
    for chance in (0.001, 0.02, 0.5, 0.7, 0.999):
        assert bounced(chance) == pytest.approx(chance, rel=0.02)
    assert 0 < bounced(0.0) < 0.01
    assert 0.99 < bounced(1.0) < 1


def test_all_odds_begin_as_chances_with_their_logits():
    odds = LearnedTables()
    cells, logits = odds.cells, odds.logits
    assert len(cells) == len(logits) == CELL_COUNT
    chances = cells[:, CHANCE].astype(float)
    assert (chances > 0).all()
    assert (chances < 1).all()
    assert np.allclose(logits, np.clip(np.log(chances / (1 - chances)), -6.9, 6.9), atol=0.01)
    assert (cells[:, SEEN] > 0).all()
    assert np.isfinite(odds.weights).all()
    assert (odds.pace > 0).all()


# Ways in which learning can be broken: what they make of the odds after a lesson, given what these were before it.


def nothing_is_learned(odds, before):
    for now, then in zip(odds.arrays, before.arrays, strict=True):
        now[:] = then


def the_opposite_is_learned(odds, before):
    chances, old = odds.cells[:, CHANCE], before.cells[:, CHANCE]
    moved = np.flatnonzero(chances != old)
    chances[moved] = np.clip(2 * old[moved] - chances[moved], 0.001, 0.999)
    odds.logits[moved] = np.log(chances[moved] / (1 - chances[moved]))
    odds.weights[:] = 2 * before.weights - odds.weights


def taught_with(drafter, lesson, bug):
    """Give a lesson to the odds, and then break what was learned if there is a bug."""
    before = copy.deepcopy(drafter.corpus.learned) if bug else None
    lesson()
    if bug:
        bug(drafter.corpus.learned, before)


def requests_of_which_some_are_repeated(steps, bug=None):
    """Context k went on with the same token 8 times of 8; now the target produces it with CHANCES[k].

    Returns a row a step: context, odds, whether the token came; and the counters.
    """
    rng = np.random.default_rng(0)
    corpus = Corpus(CAPACITY, 32)
    for context in range(len(CHANCES)):
        for _ in range(8):
            corpus.append(array([100 + context, 200 + context]))
    corpus.refresh()
    rows = []
    with SuffixDrafter(DrafterConfig(capacity=CAPACITY, cost=1e-6), corpus=corpus) as drafter:
        for step in range(steps):
            context = int(rng.integers(len(CHANCES)))
            came = bool(rng.random() < CHANCES[context])
            drafter.start(step, array([100 + context]))
            drafts = drafter.draft(progress_of({step: []}, limit=1))
            assert drafts.tokens.tolist() == [200 + context]
            rows.append((context, drafts.accept_prob[0], came))
            committed = array([200 + context if came else 300])
            taught_with(
                drafter,
                lambda step=step, committed=committed, came=came: drafter.finish(
                    step, committed, verified=1, learn=False
                ),
                bug,
            )
    return np.array(rows), drafter.stats


def assert_odds_are_chances(rows):
    """In the second half of the steps each context's odds are its chance, but for sampling and a slow start."""
    late = rows[len(rows) // 2 :]
    for context, chance in enumerate(CHANCES):
        odds = late[late[:, 0] == context, 1]
        sampling = math.sqrt(chance * (1 - chance) / len(odds))
        assert abs(odds.mean() - chance) < 0.02 + 3 * sampling


def calibration_error(odds, came):
    """The expected calibration error in ten bins of odds."""
    bins = np.minimum((odds * 10).astype(int), 9)
    return sum(abs(odds[bins == at].sum() - came[bins == at].sum()) for at in range(10)) / len(odds)


def test_odds_come_to_the_chance_of_acceptance_whatever_the_corpus_promised():
    rows, stats = requests_of_which_some_are_repeated(4000)
    assert_odds_are_chances(rows)
    late = rows[len(rows) // 2 :]
    assert calibration_error(late[:, 1], late[:, 2]) < 0.05
    assert stats.calibration_error() < 0.06
    assert stats.counters.calibration[:, COUNT].sum() == len(rows)


@pytest.mark.parametrize("bug", [nothing_is_learned, the_opposite_is_learned])
def test_broken_learning_would_be_noticed(bug):
    rows, stats = requests_of_which_some_are_repeated(600, bug)
    with pytest.raises(AssertionError):
        assert_odds_are_chances(rows)
    late = rows[len(rows) // 2 :]
    assert calibration_error(late[:, 1], late[:, 2]) > 0.1
    assert stats.calibration_error() > 0.1


def a_request_that_chooses(steps, bug=None):
    """One long request in which context k goes on with one token with CHANCES[k], else with another.

    Both are drafted. Returns a row a step: context, odds of the one and the other, whether the one came.
    """
    rng = np.random.default_rng(0)
    rows = []
    config = DrafterConfig(capacity=CAPACITY, draft_shape="tree", cost=1e-6)
    with SuffixDrafter(config, corpus=Corpus(CAPACITY, 32)) as drafter:
        drafter.start(1, array([1]))
        for _ in range(steps):
            context = int(rng.integers(len(CHANCES)))
            drafts = drafter.draft(progress_of({1: [100 + context]}, limit=8))
            children = drafts.parents == -1
            odds = dict(zip(drafts.tokens[children].tolist(), drafts.accept_prob[children].tolist(), strict=True))
            came = bool(rng.random() < CHANCES[context])
            rows.append((context, odds.get(200 + context, 0.0), odds.get(300 + context, 0.0), came))
            outcome = [200 + context if came else 300 + context]
            taught_with(drafter, lambda outcome=outcome: drafter.draft(progress_of({1: outcome}, limit=0)), bug)
    return np.array(rows)


def assert_both_odds_are_chances(rows):
    late = rows[len(rows) // 2 :]
    for context, chance in enumerate(CHANCES):
        odds = late[late[:, 0] == context, 1:3]
        sampling = math.sqrt(chance * (1 - chance) / len(odds))
        assert abs(odds[:, 0].mean() - chance) < 0.03 + 3 * sampling
        assert abs(odds[:, 1].mean() - (1 - chance)) < 0.03 + 3 * sampling
    promised, came = np.concatenate((late[:, 1], late[:, 2])), np.concatenate((late[:, 3], 1 - late[:, 3]))
    assert calibration_error(promised, came) < 0.05


def test_probabilities_of_siblings_match_their_frequencies():
    assert_both_odds_are_chances(a_request_that_chooses(3000))


def test_wrong_probabilities_of_siblings_are_detected():
    with pytest.raises(AssertionError):
        assert_both_odds_are_chances(a_request_that_chooses(400, the_opposite_is_learned))


def test_running_means_follow_tokens_and_cost_of_steps():
    config = DrafterConfig(capacity=CAPACITY, cost=0.1)
    with SuffixDrafter(config, corpus=Corpus(CAPACITY, 32)) as drafter:
        drafter.start(1, array([1, 2, 3] * 20))
        assert len(drafter.draft(progress_of({1: []}, limit=2)).tokens) == 2
        for _ in range(5000):
            drafts = drafter.draft(progress_of({1: [1, 2, 3]}, limit=2, verified=2))
            assert drafts.tokens.tolist() == [1, 2]
        assert drafter.corpus.learned.pace == pytest.approx([3, 1 + 2 * 0.1], rel=0.01)


def test_shares_use_only_samples_that_agree():
    for alive in range(1, SAMPLES + 1):
        buckets = SHARE_BUCKET[: alive + 1, alive].tolist()
        assert buckets[0] == 0
        assert all(1 <= bucket < SHARE_BUCKETS for bucket in buckets[1:])
        assert buckets == sorted(buckets)
        for votes in range(1, alive):
            assert abs(buckets[votes] - 1 - 11 * votes / alive) <= 1
    assert SHARE_BUCKET[32, 32] == SHARE_BUCKET[1, 1] == SHARE_BUCKETS - 1
