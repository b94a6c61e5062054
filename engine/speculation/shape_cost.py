"""What a step of a fixed shape takes: as long as the shape that it is padded to."""

from __future__ import annotations

import numpy as np

from engine.executor.graph import Orders
from engine.executor.shapes import StepGrid
from engine.speculation.token_budget import StepCost


class GridCost:
    """A `Cost` by which drafts fill shapes up: rows that are padding otherwise cost nothing."""

    def __init__(self, cost: StepCost, grid: StepGrid) -> None:
        """cost: of steps by their rows, padding among them."""
        self._cost = cost
        self._grid = grid

    @classmethod
    def measured(cls, grid: StepGrid) -> GridCost:
        """Time steps in which nobody sits."""
        shapes = {rows: sequences for sequences, rows in grid.shapes}

        def run(rows: int, _sequences: int) -> None:
            grid.step_of(shapes[rows], rows).run(Orders.nobody(), grid.greedy).read()

        return cls(StepCost.measured(run, sorted(shapes)), grid)

    def seconds(self, tokens: np.ndarray | int, sequences: int) -> np.ndarray:
        """See `StepCost.seconds`."""
        return self._cost.seconds(self._padded(tokens, sequences), sequences)

    def note(self, tokens: int, sequences: int, seconds: float, *, is_trial: bool = False) -> None:
        """See `StepCost.note`."""
        self._cost.note(int(self._padded(tokens, sequences)), sequences, seconds, is_trial=is_trial)

    def of_one_more(self, tokens: int, sequences: int) -> float:
        """See `StepCost.of_one_more`; not by shapes, of which the next one begins somewhere beyond one more."""
        return self._cost.of_one_more(tokens, sequences)

    def _padded(self, tokens: np.ndarray | int, sequences: int) -> np.ndarray:
        """The rows of the least shape that holds so many; what runs beside a step makes it larger than any."""
        padded = next(size for size in self._grid.sequences if size >= sequences)
        sizes = np.array(self._grid.rows_of(padded))
        # As `StepGrid.shape_for` has it.
        places = np.searchsorted(sizes, np.where(np.equal(tokens, sequences), tokens, np.maximum(tokens, padded + 1)))
        return np.where(places < len(sizes), sizes[np.minimum(places, len(sizes) - 1)], tokens)
