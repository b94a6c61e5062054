"""Totals of the steps that token budgets have learned from, for reports."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

SIZES = 15
"""Number of sizes of steps: up to 1, 2, 4, ..., 8192 tokens, and more."""
# Columns of `BudgetTotals.sizes`.
STEPS, SECONDS, EXPECTED_S = range(3)


@dataclass
class BudgetTotals:
    """Totals of one engine, or of several."""

    sizes: np.ndarray = field(default_factory=lambda: np.zeros((SIZES, 3)))
    """float64 [SIZES, 3]: number of recorded steps, sum of their durations and of the expected ones, in seconds."""
    ignored: int = 0
    """Number of steps with impossible values, which were not recorded."""
    withheld: int = 0
    """Number of draft tokens that were not verified because other use of their time is worth more."""

    def add(self, other: BudgetTotals) -> None:
        """Add other totals to these."""
        self.sizes = self.sizes + other.sizes
        self.ignored += other.ignored
        self.withheld += other.withheld


def size_of(tokens: int) -> int:
    """Return the row of a step with a number of tokens."""
    return min((tokens - 1).bit_length(), SIZES - 1)
