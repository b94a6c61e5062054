"""Figures that parts of the benchmark report, and their targets."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal


class SkippedError(Exception):
    """Raised if a part cannot run here; the message gives the reason."""


@dataclass(frozen=True)
class Target:
    """A figure to reach."""

    value: float
    sense: Literal["at least", "at most"]

    def is_met(self, value: float) -> bool:
        """Return whether `value` reaches the target."""
        return value >= self.value if self.sense == "at least" else value <= self.value


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
        row = asdict(self)
        row["value"] = round(self.value, 5)
        row["met"] = None if self.target is None else self.target.is_met(self.value)
        return row


def at_least(value: float) -> Target:
    """Return a target that larger values meet."""
    return Target(value, "at least")


def at_most(value: float) -> Target:
    """Return a target that smaller values meet."""
    return Target(value, "at most")
