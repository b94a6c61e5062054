"""Step-time curves: where they come from, and what they learn from the steps that ran."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.budget import curve as measure
from ssd.budget.cost_profile import CostProfile
from ssd.budget.curve import ALL_STEPS, MANY_SEQUENCES, StepCurve, measured_curve, usual_knots
from ssd.budget.fit import SCALE, Fit, parts_of, record_step
from ssd.budget.padding import Padding
from ssd.budget.roofline import roofline
from ssd.budget.token_budget import TokenBudget

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def ran(curve, seconds_of, sequences=1, steps=400, largest=512, seed=0, noise=0.0, outliers=0.0):
    """Record steps of random sizes, as many small ones as large ones."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        tokens = sequences * int((largest / sequences) ** rng.random())
        factor = max(0.01, 1 + noise * rng.standard_normal()) * (5 if rng.random() < outliers else 1)
        curve.record(tokens, sequences, factor * seconds_of(tokens, sequences))


# --- Where curves come from


def test_a_profile_is_interpolated_and_extrapolated():
    profile = CostProfile("some", "some", {1: {1: 10.0, 4: 13.0}, 9: {1: 18.0, 4: 29.0}})
    curve = profile.curve()
    assert curve.seconds(np.array([1, 5, 9, 17]), 1) == pytest.approx([0.010, 0.014, 0.018, 0.026])
    assert curve.seconds(5, 4) == pytest.approx(0.021)
    assert curve.seconds(5, 2) == pytest.approx((0.014 * 2 + 0.021) / 3)
    assert curve.seconds(5, 400) == pytest.approx(0.021), "no sequence is extrapolated"


def test_a_table_that_decreases_is_raised():
    curve = StepCurve.from_table([1], [1, 8, 16, 64], np.array([[1.0, 3.0, 2.0, 4.0]]))
    assert curve.seconds(np.array([1, 8, 16, 64]), 1) == pytest.approx([1, 3, 3, 4])


@pytest.mark.parametrize("cost", [0.001, 0.02, 1.0])
def test_a_fixed_cost_is_that_of_a_draft_token_of_each_sequence(cost):
    curve = StepCurve.constant(cost)
    for sequences in (1, 4, 64):
        plain, longer = curve.seconds(np.array([sequences, 3 * sequences]), sequences)
        assert longer / plain - 1 == pytest.approx(2 * cost)
        assert curve.record(sequences, sequences, 9.0)
        assert float(curve.seconds(sequences, sequences)) == plain, "it learns nothing"
    assert not curve.totals.sizes.any()


def test_knots_have_equal_ratios():
    knots = usual_knots()
    assert {1, 2, 4, 8, 1024, 8192} <= {*knots.tolist()}
    assert (np.diff(knots) > 0).all()
    assert max(right / left for left, right in itertools.pairwise(knots[6:])) < 1.4


def test_padding_is_part_of_the_duration():
    curve = CostProfile("a", "b", {1: {1: 1.0}, 100: {1: 100.0}}).curve(Padding(sizes=(4, 16)))
    assert curve.seconds(np.array([1, 4, 5, 17]), 1) == pytest.approx([0.004, 0.004, 0.016, 0.017])
    assert curve.step_tokens(np.array([2, 0, 5]), other_tokens=3) == 13
    padded = StepCurve.constant(0.1, Padding(lengths=(0, 4)))
    assert padded.step_tokens(np.array([2, 0, 3]), other_tokens=3) == 18
    assert padded.step_tokens(np.array([0, 0, 0])) == 3
    assert padded.step_tokens(np.array([7])) == 8, "a length that the engine does not have"


class Machine:
    """A machine on which a step takes `seconds_of(tokens, sequences)`, and each third step a second more."""

    def __init__(self, monkeypatch, seconds_of):
        self.now, self.ran, self._seconds_of = 0.0, [], seconds_of
        monkeypatch.setattr(measure, "perf_counter", lambda: self.now)

    def run(self, tokens, sequences):
        self.ran.append((tokens, sequences))
        self.now += self._seconds_of(tokens * sequences, sequences) + (len(self.ran) % 3 == 0)


def seconds_of(tokens, sequences):
    return 0.01 + 0.001 * tokens + 0.002 * (sequences - 1)


def test_disturbed_steps_do_not_count(monkeypatch):
    machine = Machine(monkeypatch, seconds_of)
    curve = measured_curve(machine.run, (1, 4))
    assert curve.seconds(np.array([1, 2, 4]), 1) == pytest.approx([0.011, 0.012, 0.014])


def test_the_time_per_sequence_is_measured_with_one_token_each(monkeypatch):
    machine = Machine(monkeypatch, seconds_of)
    curve = measured_curve(machine.run, (1, 16), sequences=64)
    assert {(1, MANY_SEQUENCES)} == {each for each in machine.ran if each[1] > 1}
    for sequences in (1, 2, 64):
        assert float(curve.seconds(16, sequences)) == pytest.approx(seconds_of(16, sequences))


def test_slow_machines_measure_two_sizes(monkeypatch):
    machine = Machine(monkeypatch, lambda tokens, sequences: 10.0 * tokens)
    curve = measured_curve(machine.run, (1, 2, 4, 8))
    assert {tokens for tokens, _ in machine.ran} == {1, 2}
    assert float(curve.seconds(8, 1)) == pytest.approx(80.0)


# --- What they learn


def h100(tokens, sequences):
    return 0.005 + 0.0001 * max(0, tokens - 64) + 0.00001 * sequences


@pytest.mark.parametrize(
    ("start", "tolerance"),
    [
        pytest.param(StepCurve.unknown, 0.15, id="unknown"),
        pytest.param(roofline("l4", "8b").curve, 0.4, id="other hardware"),
    ],
)
def test_the_curve_of_noisy_steps_is_learned(start, tolerance):
    curve = start()
    ran(curve, h100, steps=1500, noise=0.1, outliers=0.01)
    expected = np.array([h100(size, 1) for size in SIZES])
    assert curve.seconds(np.array(SIZES), 1) == pytest.approx(expected, rel=tolerance)


@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.integers(1, 20), st.floats(1e-6, 100.0)),
        max_size=30,
    ),
    st.booleans(),
)
def test_larger_steps_never_take_less_time(steps, is_known):
    curve = roofline("h100", "8b").curve() if is_known else StepCurve.unknown()
    for tokens, sequences, seconds in steps:
        curve.record(max(tokens, sequences), sequences, seconds)
    for sequences in (1, 7, 64):
        row = curve.row(sequences)
        assert np.isfinite(row).all()
        assert (row > 0).all()
        assert (np.diff(row) >= -1e-12).all()


def test_small_steps_take_time_even_if_prompts_seemed_to_take_all_of_it():
    curve = StepCurve.from_table([1, 16], [1, 4096], np.array([[0.01, 0.5], [0.012, 0.5]]))
    # With attention over the prompts, time grows faster than the number of tokens.
    for tokens in 30 * [1024, 8000]:
        curve.record(tokens, 16, 0.5 * (tokens / 4096) ** 1.5)
    budget = TokenBudget(curve)
    assert 0 < budget.seconds(1) < 0.01
    assert np.isfinite(budget.saved(accepted=4, tokens=9, drafted=8))
    for _ in range(30):
        curve.record(1, 1, 0.01)
    assert curve.seconds(1, 1) == pytest.approx(0.01, rel=0.2)


@pytest.mark.parametrize(
    "step",
    [
        *((4, 1, seconds) for seconds in (0.0, -1.0, float("nan"), float("inf"), 1e9)),
        *((*sizes, 0.1) for sizes in [(0, 0), (0, 1), (1, 0), (3, 4), (-1, -1), (1 << 40, 1)]),
    ],
)
def test_impossible_steps_are_counted_and_change_nothing(step):
    curve = StepCurve.unknown()
    ran(curve, h100)
    before = curve.row(1).tolist(), curve.revision, curve.totals.sizes.tolist()
    assert not curve.record(*step)
    assert (curve.row(1).tolist(), curve.revision, curve.totals.sizes.tolist()) == before
    assert curve.totals.ignored == 1


def spread(tokens, sequences):
    return 0.01 + 0.0005 * sequences + 0.0001 * tokens


def mixed(count):
    """Steps of 1, 8 or 32 sequences with up to four tokens of each."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        sequences = int(rng.choice([1, 8, 32]))
        yield (tokens := sequences * int(rng.integers(1, 5))), sequences, spread(tokens, sequences)


def of_sizes(seconds_of, steps=400, seed=0):
    """Steps of one sequence of random sizes, as many small ones as large ones."""
    rng = np.random.default_rng(seed)
    sizes = [int(512 ** rng.random()) for _ in range(steps)]
    return [(tokens, 1, seconds_of(tokens, 1)) for tokens in sizes]


def twice(tokens, sequences):
    return 2 * h100(tokens, sequences)


def disturbed(steps, seed=1):
    """2 % of the steps take 40 times as long, by which a least-squares fit is misled."""
    rng = np.random.default_rng(seed)
    return [(*sizes, seconds * (40 if rng.random() < 0.02 else 1)) for *sizes, seconds in steps]


PROMPTS = [step for at in range(40) for step in [(1, 1, 0.01), *[(400 + at, 2, 0.05)] * (at % 4 == 0)]]
SCENARIOS = {
    "outliers count little": (disturbed(of_sizes(h100)), {(1, 1): h100(1, 1), (512, 1): h100(512, 1)}, 0.15),
    "an engine becomes slower": (
        of_sizes(h100) + of_sizes(twice, seed=1), {(size, 1): twice(size, 1) for size in SIZES}, 0.2
    ),
    "first steps compile": ([(1, 1, 30.0)] * 3 + of_sizes(h100, 200), {(1, 1): h100(1, 1)}, 0.1),
    "a few prompts show what large steps take": (PROMPTS, {(420, 2): 0.05}, 0.15),
    "sequences have a price of their own": (
        list(mixed(600)), {(2 * count, count): spread(2 * count, count) for count in (1, 8, 32)}, 0.1
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_curve_follows_the_steps(name):
    steps, expected, tolerance = SCENARIOS[name]
    curve = StepCurve.unknown()
    for step in steps:
        curve.record(*step)
    found = [float(curve.seconds(*sizes)) for sizes in expected]
    assert found == pytest.approx([*expected.values()], rel=tolerance)


def test_a_step_takes_longer_if_a_sequence_has_several_tokens():
    """An engine that runs one token of each sequence in a faster way is slower with few drafts than without any."""
    curve, rng = StepCurve.unknown(), np.random.default_rng(0)
    for _ in range(400):
        drafted = int(rng.choice([0, 16, 32, 64]))
        curve.record(64 + drafted, 64, 0.013 + (drafted > 0) * 0.003 + 0.00004 * drafted)
    assert curve.ragged_seconds(64) == pytest.approx(0.003, rel=0.25)
    assert float(curve.seconds(64, 64)) == pytest.approx(0.013, rel=0.05)
    budget = TokenBudget(curve)
    budget.prepare(64)
    # At first 1.5 tokens are expected per sequence and step: 7.4 per millisecond.
    assert budget.select(np.full(12, 0.9, np.float32), np.arange(13)).sum() == 0
    assert budget.select(np.full(64, 0.9, np.float32), np.arange(65)).sum() == 64


def test_the_next_size_is_tried_and_then_known():
    """Sizes that never ran are expected to be free until some steps have tried them, one part at a time."""
    curve, sizes = StepCurve.unknown(), []
    budget = TokenBudget(curve)
    for step in range(400):
        budget.prepare(1)
        found = step % 5
        [drafted] = budget.select(np.full(found, 0.3, np.float32), np.array([0, found]))
        sizes.append(1 + int(drafted))
        curve.record(sizes[-1], 1, float(sizes[-1]))
    assert max(sizes) > 1
    assert sizes[-300:] == [1] * 300


def test_trials_of_sizes_that_are_not_worthwhile_take_less_than_a_hundredth_of_the_time():
    def seconds(tokens, sequences):
        return 0.01 + 0.0004 * tokens

    curve = StepCurve.unknown()
    budget, spent, plain, rng = TokenBudget(curve), 0.0, 0.0, np.random.default_rng(0)
    for _ in range(8000):
        budget.prepare(8)
        [drafted] = budget.select(np.array([0.02] * 8, np.float32), np.array([0, 8]))
        tokens = 8 + int(drafted)
        spent, plain = spent + seconds(tokens, 8), plain + seconds(8, 8)
        curve.record(tokens, 8, seconds(tokens, 8) * (1 + 0.1 * rng.standard_normal()))
    assert spent < 1.01 * plain


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [([1], [100]), ([1, 8], [100, 100]), ([1] * 7 + [8], [100, 50])],
    ids=["alike", "alternating", "rare"],
)
def test_later_steps_of_a_kind_are_recorded_at_intervals(kinds, expected):
    curve = StepCurve.unknown()
    for tokens in [1] * ALL_STEPS + kinds * (400 // len(kinds)):
        curve.record(tokens, 1, 0.01)
    found = curve.totals.sizes[[0, 3], 0] - [ALL_STEPS, 0]
    assert found == pytest.approx([*expected, 0][:2], abs=2)


def test_totals_have_the_durations_by_size():
    curve = StepCurve.unknown()
    for tokens in (1, 2, 3, 4, 5, 9000, 20_000):
        curve.record(tokens, 1, 0.5)
    assert curve.totals.sizes[:, 0].tolist() == [1, 1, 2, 1, *[0] * 10, 2]
    assert curve.totals.sizes[2, 1] == pytest.approx(1.0)
    assert (curve.totals.sizes[[0, 1, 2, 3, 14], 2] > 0).all()


# --- The fit against a slow one


class SlowFit:
    """`Fit` that remembers every step, and finds the best factors by trying each set of them that may be least."""

    def __init__(self, knots, spread):
        middle = np.log(knots[1:] * knots[:-1]) / 2
        covariance = np.diag([1.0, spread**2, 4.0**2] + [0.0] * len(middle))
        for row, column in itertools.product(range(len(middle)), repeat=2):
            nearness = np.exp(-abs(middle[row] - middle[column]))
            covariance[3 + row, 3 + column] = spread**2 * (0.5 + 0.5 * nearness)
        self.knots, self.prior = knots, np.linalg.inv(covariance)
        self.rows, self.scale, self.mean_deviation, self.prior_ratio, self.number = [], 1.0, 0.0, 0.0, 0

    def record(self, factors, parts, tokens, seconds, is_ragged):
        """factors: those before the step. Returns by how much later ones are divided."""
        shares = np.maximum(0, (tokens - self.knots[:-1]) / np.diff(self.knots))
        shares[:-1] = np.minimum(shares[:-1], 1)
        features = parts * np.concatenate(([1, 1, is_ragged], shares))
        expected = features @ factors
        if self.number == 0 or (self.number < 20 and seconds < expected * self.scale / 2):
            self.scale, self.rows = seconds / expected, []
        self.number += 1
        limit = max(0.4, 3 * self.mean_deviation)
        deviation = seconds / (expected * self.scale) - 1
        self.mean_deviation += 0.1 * (min(abs(deviation), 2 * limit) - self.mean_deviation)
        deviation = np.clip(deviation, -limit, limit)
        level = 1 + 0.1 * deviation
        self.scale *= level
        self.rows = [(0.999 * weight, *row) for weight, *row in self.rows]
        self.rows.append((1 / (0.1 * expected) ** 2, features, expected * (1 + deviation) / level))
        self.prior_ratio += 0.05 * (np.log((1 + deviation) * expected / features.sum()) - self.prior_ratio)
        if abs(self.prior_ratio) > np.log(3):
            mean, self.prior_ratio = np.exp(self.prior_ratio), 0.0
            self.scale *= mean
            self.rows = [(weight * mean**2, each, value / mean) for weight, each, value in self.rows]

    def loss(self, factors):
        """Return the negative logarithm of the probability of the factors, without a constant."""
        difference = factors - 1
        errors = sum(weight * (each @ factors - value) ** 2 for weight, each, value in self.rows)
        return (difference @ self.prior @ difference + errors) / 2

    def best_factors(self):
        precision = self.prior + sum(weight * np.outer(each, each) for weight, each, _ in self.rows)
        target = self.prior.sum(1) + sum(weight * each * value for weight, each, value in self.rows)
        least = np.array([0.01] + [0.0] * (len(target) - 1))
        candidates = []
        for free in itertools.product([False, True], repeat=len(target)):
            chosen, solution = np.flatnonzero(free), np.where(free, 0.0, least)
            others = target - precision @ solution
            solution[chosen] = np.linalg.solve(precision[np.ix_(chosen, chosen)], others[chosen])
            if (solution >= least).all():
                candidates.append(solution)
        return min(candidates, key=self.loss)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.floats(0.3, 9.0), st.booleans()), min_size=1, max_size=30),
    st.floats(0.01, 100),
    st.sampled_from([0.5, 1]),
)
def test_the_fit_is_the_most_probable_one(steps, unit, spread):
    knots = np.array([1.0, 2.0, 4.0, 8.0])
    parts = parts_of(1 + knots / 4 + 0.25, 1.25, knots, 2)
    fit, slow = Fit.of(knots, spread), SlowFit(knots, spread)
    for tokens, seconds, is_ragged in steps:
        slow.record(fit.factors.copy(), parts, tokens, unit * seconds, is_ragged)
        record_step(fit, parts, tokens, unit * seconds, is_ragged)
        assert fit.state[SCALE] == pytest.approx(slow.scale)
        # It ends after a limited number of passes, which leave something to those after the next step.
        least = slow.loss(slow.best_factors())
        assert slow.loss(fit.factors) == pytest.approx(least, rel=0.02, abs=0.5)
