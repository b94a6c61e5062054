"""Cost of steps: interpolated, corrected by steps, and rounded up to the shapes that run them."""

import numpy as np
import pytest
import torch

from engine.executor.device_state import DeviceState
from engine.executor.shapes import StepGrid
from engine.speculation.step_cost import ExpertUse, PaddedCost, StepCost
from engine.speculation.token_budget import TokenBudget
from tests.engine.speculation.test_token_budget import drafts_of


def test_costs_are_interpolated_and_extrapolated():
    cost = StepCost([1, 11, 21], [1.0, 2.0, 4.0])
    assert cost.seconds(np.array([1, 6, 11, 16, 31]), 1).tolist() == [1.0, 1.5, 2.0, 3.0, 6.0]
    # A disturbed measurement does not make larger steps cheaper.
    assert StepCost([1, 2, 3], [1.0, 5.0, 2.0]).seconds(3, 1) == 5.0
    assert StepCost([1, 2], [1.0, 2.0], 0.5).seconds(2, 3) == 3.0


def test_cost_of_one_more_is_relative_to_the_time_per_sequence():
    cost = StepCost([1, 101], [1.0, 2.0])
    assert cost.of_one_more(1, 1) == pytest.approx(0.01)
    assert cost.of_one_more(51, 10) == pytest.approx(10 * 0.01 / 1.5)
    assert StepCost([1, 2], [1.0, 9.0]).of_one_more(1, 1) == 1.0
    assert StepCost([1, 2], [1.0, 1.0]).of_one_more(1, 1) == pytest.approx(1e-4)
    # A single size that was disturbed does not make all drafts expensive.
    assert StepCost([1, 2, 17], [1.0, 2.0, 2.0]).of_one_more(1, 1) == pytest.approx(1 / 16)


def test_recorded_steps_correct_the_measured_cost():
    cost = StepCost([1, 16, 256], [1.0, 1.0, 1.0])
    for _ in range(400):
        cost.record(16, 1, 3.0)
        cost.record(1, 1, 1.0)
    assert cost.seconds(16, 1) == pytest.approx(3.0, rel=0.1)
    assert cost.seconds(1, 1) == pytest.approx(1.0, rel=0.4)
    before = cost.seconds(256, 1)
    cost.record(256, 1, 1e6)  # a disturbance
    assert cost.seconds(256, 1) < 1.1 * before


def test_corrections_also_apply_to_sizes_that_do_not_occur():
    cost = StepCost([1, 17, 257], [2.0, 2.5, 10.0])  # all of them twice the true time
    for _ in range(200):
        cost.record(1, 1, 1.0)
    assert cost.seconds(1, 1) == pytest.approx(1.0, rel=0.05)
    assert cost.seconds(17, 1) / cost.seconds(1, 1) < 1.25 * 1.2


def test_sizes_are_measured_up_to_the_largest():
    measured = []
    cost = StepCost.measured(lambda *size: measured.append(size), [1, 2, 4, 8, 16, 32, 64, 100], 8)
    assert sorted(set(measured)) == [(1, 1), (1, 8), *((size, 1) for size in (2, 4, 8, 16, 32, 64, 100))]
    assert cost.seconds(100, 1) > 0
    assert cost.seconds(1, 8) >= cost.seconds(1, 1)


def test_expected_experts_are_the_mean_of_uniform_choices():
    rng = np.random.default_rng(0)
    for tokens in (1, 2, 5, 20):
        counts = [
            len(set().union(*(rng.choice(16, 3, replace=False).tolist() for _ in range(tokens)))) for _ in range(2000)
        ]
        assert ExpertUse(3, 16).expected(tokens) == pytest.approx(np.mean(counts), rel=0.02)


@pytest.mark.parametrize("tokens", [2, 16, 200])
def test_the_effective_number_of_experts_is_learned(tokens):
    use, of_fewer = ExpertUse(2, 64), ExpertUse(2, 10)
    assert use.expected(tokens) > of_fewer.expected(tokens)
    use.record(1, 2.0)  # a single token gives no information
    assert use.expected(8) == ExpertUse(2, 64).expected(8)
    for _ in range(300):
        use.record(tokens, float(of_fewer.expected(tokens)))
    np.testing.assert_allclose(use.expected(np.arange(1, 50)), of_fewer.expected(np.arange(1, 50)), rtol=0.01)
    use.record(tokens, 0.0)
    use.record(tokens, 1000.0)
    assert np.isfinite(use.expected(tokens))
    assert use.expected(1) == pytest.approx(2)


def clocked(monkeypatch, seconds):
    """Let `run(tokens, sequences, equal)` take `seconds` of it on a fake clock; return `run`."""
    now = 0.0

    def run(*arguments):
        nonlocal now
        now += seconds(*arguments)

    monkeypatch.setattr("engine.speculation.step_cost.perf_counter", lambda: now)
    return run


def test_the_time_of_experts_is_measured_with_equal_tokens(monkeypatch):
    counts = []

    def seconds(tokens, sequences, equal=False):
        counts.append(2 if equal else min(2 * tokens * sequences, 10))
        return 1e-3 * (5 + 0.1 * tokens * sequences + sequences + 3 * counts[-1])

    run = clocked(monkeypatch, seconds)
    cost = StepCost.measured(run, [1, 2, 4, 8, 16], 4, ExpertUse(2, 10), lambda: counts[-1])
    for tokens in (4, 16):
        expected = 1e-3 * (6 + 0.1 * tokens + 3 * float(ExpertUse(2, 10).expected(tokens)))
        assert cost.seconds(tokens, 1) == pytest.approx(expected)
        assert cost.seconds(tokens, 3) == pytest.approx(expected + 2e-3)
    for _ in range(300):  # The text uses the same two experts for all of its tokens.
        cost.record(16, 1, 1e-3 * (6 + 1.6 + 3 * 2), experts=2.0)
    assert cost.seconds(16, 1) == pytest.approx(13.6e-3, rel=0.02)
    assert cost.seconds(8, 1) == pytest.approx(12.8e-3, rel=0.02)


def test_experts_that_are_not_counted_are_part_of_the_time(monkeypatch):
    run = clocked(monkeypatch, lambda tokens, _sequences, equal=False: 1e-3 * (1 if equal else tokens))
    cost = StepCost.measured(run, [1, 2, 4, 8, 16], 1, ExpertUse(2, 10), lambda: 0.0)
    np.testing.assert_allclose(cost.seconds(np.arange(1, 17), 1), 1e-3 * np.arange(1, 17))


def test_measuring_stops_after_the_time_limit(monkeypatch):
    now = 0.0

    def run(tokens, _sequences):
        nonlocal now
        now += tokens * 0.1

    monkeypatch.setattr("engine.speculation.step_cost.perf_counter", lambda: now)
    cost = StepCost.measured(run, [1, 2, 4, 8, 16, 32, 1000])
    assert cost.seconds(4, 1) == pytest.approx(0.4)
    assert cost.seconds(1000, 1) == pytest.approx(100)  # extrapolated with the last slope
    assert now < 30


GRID = StepGrid(None, None, max_sequences=8, max_draft=16)
BY_ROWS = StepCost([1, 1001], [1.0, 11.0])
COST = PaddedCost(BY_ROWS, GRID.padded_rows)


def test_a_padded_step_has_the_cost_of_its_shape():
    assert GRID.rows_of(8) == [8, 12, 16, 24, 40, 72, 136]
    for sequences, tokens, rows in (
        (8, 8, 8),
        (8, 9, 12),
        (5, 5, 8),
        (5, 6, 12),
        (5, 13, 16),
        (1, 17, 17),
        (1, 2, 5),
        (8, 500, 500),
    ):
        assert COST.seconds(tokens, sequences) == BY_ROWS.seconds(rows, 1)
    many = np.array([5, 6, 9, 17])
    assert COST.seconds(many, 1).tolist() == BY_ROWS.seconds(np.array([5, 9, 9, 17]), 1).tolist()


def test_the_cost_of_one_more_ignores_padding():
    assert COST.of_one_more(8, 8) == BY_ROWS.of_one_more(8, 8)


def test_recorded_steps_correct_the_cost_of_their_shape():
    cost = PaddedCost(StepCost([1, 12, 100], [1.0, 1.0, 1.0]), GRID.padded_rows)
    for _ in range(500):
        cost.record(9, 8, 2.0)
    assert cost.seconds(12, 8) == pytest.approx(2.0, rel=0.01)


def test_draft_tokens_that_replace_padding_are_free():
    """The first sequence's tokens need a larger shape, whose padding the second one's unlikely tokens fill."""
    budget = TokenBudget(PaddedCost(StepCost([2, 6, 10, 34], [1.0, 1.1, 9.0, 90.0]), GRID.padded_rows))
    drafts = drafts_of([0.9, 0.9], [0.01, 0.01, 0.01])
    assert budget.select(drafts, np.array([2, 3]), 2).lengths.tolist() == [2, 2]


class Timed:
    """Steps whose duration is proportional to their rows."""

    def __init__(self):
        self.now = 0.0

    def make(self, sequences, rows):
        def run(order, kind):
            assert not order.contexts
            self.now += 0.01 * rows
            return self

        return type("Step", (), {"run": staticmethod(run)})

    def read(self):
        return np.empty((0, 0))


def test_shapes_are_measured(monkeypatch):
    timed = Timed()
    monkeypatch.setattr("engine.speculation.step_cost.perf_counter", lambda: timed.now)
    monkeypatch.setattr("engine.speculation.step_cost.MEASURING_S", 1000)
    state = DeviceState.empty(1, 1, 1, 0, torch.device("cpu"))
    cost = StepGrid(timed.make, state, max_sequences=4, max_draft=8).measure()
    assert cost.seconds(3, 1) == pytest.approx(0.05)
    assert cost.seconds(21, 4) == pytest.approx(0.36)
