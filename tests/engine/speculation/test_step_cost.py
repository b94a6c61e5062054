"""Cost of steps: interpolated, corrected by steps, and rounded up to the shapes that run them."""

import numpy as np
import pytest
import torch

from engine.executor.device_state import DeviceState
from engine.executor.shapes import StepGrid
from engine.speculation.step_cost import PaddedCost, StepCost
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
    asked = []
    cost = StepCost.measured(lambda *size: asked.append(size), [1, 2, 4, 8, 16, 32, 64, 100], 8)
    assert sorted(set(asked)) == [(1, 1), (1, 8), *((size, 1) for size in (2, 4, 8, 16, 32, 64, 100))]
    assert cost.seconds(100, 1) > 0
    assert cost.seconds(1, 8) >= cost.seconds(1, 1)


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
