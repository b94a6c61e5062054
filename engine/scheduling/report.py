"""What a step of the engine reports to its caller, and the durations of its stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Literal

import numpy as np

from engine.drafters.sources import DraftSource
from engine.scheduling.request import Completion
from engine.scheduling.result import NO_RESULTS, ResultArrays, StepResult

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


@dataclass
class StepReport:
    """Results and timing of one step."""

    result: StepResult | None = None
    """Results of the step; None if none was run."""
    finished: dict[int, Completion] = field(default_factory=dict)
    """Completions by the ids that `Engine.add` returned."""
    refused: dict[int, str] = field(default_factory=dict)
    """Reasons why requests in `finished` were aborted: their grammars cannot continue."""
    times: StageTimes = field(default_factory=StageTimes)
    """Durations of the stages."""
    is_ahead: bool = False
    """Whether the next step was launched before the results of this one were read."""
    is_backing_off: bool = False
    """Whether the drafter was not called because drafting was not worthwhile recently."""

    @cached_property
    def arrays(self) -> ResultArrays:
        """The results of the sequences that produced tokens."""
        return NO_RESULTS if self.result is None else self.result.arrays

    @property
    def tokens(self) -> dict[int, np.ndarray]:
        """Committed tokens by the ids that `Engine.add` returned."""
        return {sequence_id: tokens for sequence_id, tokens, _ in self.arrays.each()}

    @property
    def produced(self) -> int:
        """Number of sequences that produced tokens."""
        return 0 if self.result is None else self.result.counts.producing

    @property
    def committed(self) -> int:
        """Number of committed tokens."""
        return 0 if self.result is None else self.result.counts.committed

    @property
    def accepted(self) -> int:
        """Number of accepted draft tokens, without those that a grammar forced."""
        if self.result is not None and not len(self.result.plan.constrained):
            return self.result.counts.accepted
        return int(np.count_nonzero(self.arrays.accepted_sources != DraftSource.GRAMMAR))
