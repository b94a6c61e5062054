"""What an engine has done since it began."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.api.messages import Figures
from engine.request import Completion, Request

if TYPE_CHECKING:
    from engine.core import Engine, StepReport


class Tally:
    """Totals of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps = self._prompt_tokens = self._cached_tokens = self._generated = 0
        self._outcomes = self._drafts = self._drafted = self._accepted = 0
        positions = engine.max_draft
        self._drafted_at = np.zeros(positions, np.int64)
        self._accepted_at = np.zeros(positions, np.int64)

    def begun(self, request: Request) -> None:
        """A request was taken."""
        self._prompt_tokens += len(request.prompt)

    def stepped(self, report: StepReport) -> None:
        """The engine made a step."""
        self._steps += 1
        for outcome in report.outcomes:
            self._outcomes += 1
            self._generated += len(outcome.tokens)
            self._drafts += outcome.drafted > 0
            self._drafted += outcome.drafted
            self._accepted += outcome.accepted
            self._drafted_at[: outcome.depth] += 1
            self._accepted_at[: outcome.accepted] += 1

    def ended(self, completion: Completion) -> None:
        """A request is over."""
        self._cached_tokens += completion.cached_tokens

    def figures(self) -> Figures:
        """All of it, and what goes on now."""
        scheduler = self._engine.scheduler
        return Figures(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated,
            sequence_steps=self._outcomes,
            drafts=self._drafts,
            drafted=self._drafted,
            accepted=self._accepted,
            drafted_at=tuple(self._drafted_at.tolist()),
            accepted_at=tuple(self._accepted_at.tolist()),
            pages_used=1 - scheduler.pages.free / scheduler.pages.count,
            pages=scheduler.pages.count,
        )
