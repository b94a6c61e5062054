"""The interface between the engine's loop and its executors."""

from __future__ import annotations

from typing import Protocol

from engine.scheduling.plan import StepPlan
from engine.scheduling.result import StepResult


class InFlightStep(Protocol):
    """A launched step whose results have not been read."""

    plan: StepPlan

    def result(self) -> StepResult:
        """Wait for the results and return them. Outputs are not cut where they end."""
        ...


class Executor(Protocol):
    """Runs steps on a device, in the order in which they are launched."""

    def launch(self, plan: StepPlan) -> InFlightStep:
        """Start a step; may return before the device has run it."""
        ...
