"""Figures that parts of the benchmark report, and their targets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.support.targets import Target


class SkippedError(Exception):
    """Raised if a part cannot run here; the message gives the reason."""


@dataclass(frozen=True)
class Figure:
    """One measured value."""

    name: str
    value: float
    unit: str
    of: int
    """Number of values that it is the median of; 1 for a count or a derived value."""
    target: Target | None = None
    details: dict[str, Any] = field(default_factory=dict)
    """Additional values of the same run; names contain units."""

    def as_row(self) -> dict[str, Any]:
        """Return the figure as a row of a document."""
        value = round(self.value, 5)
        row = {"name": self.name, "value": value} if self.target is None else self.target.row(self.name, value)
        return {**row, "unit": self.unit, "of": self.of, "details": self.details}
