"""How long the stages of a step take."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Literal

Stage = Literal["schedule", "draft", "forward", "verify", "commit"]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds that the stages of one step took."""

    schedule: float = 0.0
    """Admitting requests, giving out pages and laying out the batch."""
    draft: float = 0.0
    """Telling the drafter of what is new, and waiting for its drafts."""
    forward: float = 0.0
    """The model, up to its logits."""
    verify: float = 0.0
    """Choosing tokens from the logits."""
    commit: float = 0.0
    """Accepting drafts, appending what was produced, and ending what has ended."""

    @property
    def overhead(self) -> float:
        """All but the model and the drafter."""
        return self.schedule + self.verify + self.commit

    @property
    def total(self) -> float:
        """The whole step."""
        return self.overhead + self.draft + self.forward


class Stopwatch:
    """Adds up what stages take; a stage may come in several parts."""

    def __init__(self) -> None:
        """Starts at once."""
        self._seconds: dict[Stage, float] = {}
        self._last = perf_counter()

    def lap(self, stage: Stage) -> None:
        """What has passed since the last lap was of this stage."""
        now = perf_counter()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def times(self) -> StageTimes:
        """The sums so far."""
        return StageTimes(**self._seconds)
