"""Durations of the stages of a step."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Literal

Stage = Literal["schedule", "draft", "forward", "verify", "commit"]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Durations of the stages of one step, in seconds."""

    schedule: float = 0.0
    """Admitting requests and allocating pages."""
    draft: float = 0.0
    """Reporting to the drafter and waiting for its drafts."""
    forward: float = 0.0
    """The model up to its logits; on an asynchronous device only the launch."""
    verify: float = 0.0
    """Sampling and verifying, or waiting for a device that does."""
    commit: float = 0.0
    """Appending tokens and ending sequences."""

    @property
    def overhead(self) -> float:
        """Duration of all stages except the model and the drafter."""
        return self.schedule + self.verify + self.commit

    @property
    def total(self) -> float:
        """Duration of the whole step."""
        return self.overhead + self.draft + self.forward


class Stopwatch:
    """Measures the stages of a step; a stage may have several laps."""

    def __init__(self) -> None:
        """Start the first lap."""
        self._seconds: dict[Stage, float] = {}
        self._last = perf_counter()

    def lap(self, stage: Stage) -> float:
        """Add the time since the last lap to a stage, and return it."""
        now = perf_counter()
        passed, self._last = now - self._last, now
        self._seconds[stage] = self._seconds.get(stage, 0.0) + passed
        return passed

    def times(self) -> StageTimes:
        """Return the sums so far."""
        return StageTimes(**self._seconds)
