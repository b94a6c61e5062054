"""What steps of fixed shapes cost: as much as the shape, whatever of it is padding."""

import numpy as np
import pytest
import torch

from engine.executor.device_state import DeviceState
from engine.executor.shapes import StepGrid
from engine.speculation.shape_cost import GridCost
from engine.speculation.token_budget import Budget, StepCost
from tests.engine.speculation.test_token_budget import drafts_of

GRID = StepGrid(None, None, max_sequences=8, max_draft=16)
BY_ROWS = StepCost([1, 1001], [1.0, 11.0])
COST = GridCost(BY_ROWS, GRID)


def test_a_step_costs_what_its_shape_does():
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


def test_the_price_of_one_more_does_not_depend_on_shapes():
    assert COST.of_one_more(8, 8) == BY_ROWS.of_one_more(8, 8)


def test_what_is_noted_is_that_of_the_shape():
    cost = GridCost(StepCost([1, 12, 100], [1.0, 1.0, 1.0]), GRID)
    for _ in range(500):
        cost.note(9, 8, 2.0)
    assert cost.seconds(12, 8) == pytest.approx(2.0, rel=0.01)


def test_drafts_fill_a_shape_up():
    """The second sequence's unlikely tokens cost nothing once the first one's have brought the larger shape."""
    budget = Budget(GridCost(StepCost([2, 6, 10, 34], [1.0, 1.1, 9.0, 90.0]), GRID))
    drafts = drafts_of([0.9, 0.9], [0.01, 0.01, 0.01])
    assert budget.spend(drafts, np.array([2, 3]), 2).lengths.tolist() == [2, 2]


class Timed:
    """Steps whose time goes by their rows."""

    def __init__(self):
        self.now = 0.0

    def make(self, sequences, rows):
        def run(orders, kind):
            assert not orders.seats
            self.now += 0.01 * rows
            return self

        return type("Step", (), {"run": staticmethod(run)})

    def read(self):
        return np.empty((0, 0))


def test_shapes_are_measured(monkeypatch):
    timed = Timed()
    monkeypatch.setattr("engine.speculation.token_budget.perf_counter", lambda: timed.now)
    monkeypatch.setattr("engine.speculation.token_budget.MEASURING_S", 1000)
    state = DeviceState.empty(1, 1, 1, 0, torch.device("cpu"))
    cost = GridCost.measured(StepGrid(timed.make, state, max_sequences=4, max_draft=8))
    assert cost.seconds(3, 1) == pytest.approx(0.05)
    assert cost.seconds(21, 4) == pytest.approx(0.36)
