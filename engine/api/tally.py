"""What an engine has done since it began."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np

from engine.api.messages import STEP_TOKENS, CorpusFigures, Figures
from engine.scheduling.request import Completion, FinishReason, Request
from ssd.types import Source

if TYPE_CHECKING:
    from engine.engine import Engine, StepReport
    from engine.scheduling.plan import SequenceResult

SOURCES = tuple(source.name.lower() for source in Source)


class Tally:
    """Totals of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps = self._prompt_tokens = self._cached_tokens = self._generated = self._learned = 0
        self._sequence_steps = self._drafts = self._drafted = self._accepted = 0
        positions = engine.max_draft
        self._drafted_at = np.zeros(positions, np.int64)
        self._accepted_at = np.zeros(positions, np.int64)
        self._drafted_from = np.zeros(len(SOURCES), np.int64)
        self._accepted_from = np.zeros(len(SOURCES), np.int64)
        self._step_tokens = [0] * (len(STEP_TOKENS) + 1)
        self._step_tokens_sum = 0
        self._prompts: dict[int, int] = {}
        """Tokens of the prompts that are not computed yet, by the engine's ids."""

    def begun(self, sequence_id: int, request: Request) -> None:
        """A request was taken."""
        self._prompt_tokens += len(request.prompt)
        self._prompts[sequence_id] = len(request.prompt)

    def stepped(self, report: StepReport) -> None:
        """The engine made a step."""
        self._steps += 1
        step_tokens = 0
        drafts: list[SequenceResult] = []
        for result in report.results:
            self._sequence_steps += 1
            step_tokens += len(result.tokens) + self._prompts.pop(result.sequence_id, 0)
            self._generated += len(result.tokens)
            if result.drafted:
                drafts.append(result)
        if step_tokens:
            self._step_tokens[bisect_left(STEP_TOKENS, step_tokens)] += 1
            self._step_tokens_sum += step_tokens
        if drafts:
            self._note_drafts(drafts)

    def ended(self, sequence_id: int, request: Request, completion: Completion) -> None:
        """A request is over."""
        self._prompts.pop(sequence_id, None)
        self._cached_tokens += completion.cached_tokens
        if request.learn and completion.finish_reason is not FinishReason.ABORT:
            self._learned += len(completion.tokens)

    def figures(self) -> Figures:
        """All of it, and what goes on now."""
        scheduler = self._engine.scheduler
        return Figures(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preemptions=scheduler.preemptions,
            steps=self._steps,
            step_tokens=tuple(self._step_tokens),
            step_tokens_sum=self._step_tokens_sum,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated,
            sequence_steps=self._sequence_steps,
            drafts=self._drafts,
            drafted=self._drafted,
            accepted=self._accepted,
            drafted_at=tuple(self._drafted_at.tolist()),
            accepted_at=tuple(self._accepted_at.tolist()),
            drafted_from=dict(zip(SOURCES, self._drafted_from.tolist(), strict=True)),
            accepted_from=dict(zip(SOURCES, self._accepted_from.tolist(), strict=True)),
            learned_tokens=self._learned,
            corpus=self._corpus(),
            pages_used=1 - scheduler.pages.free_count / scheduler.pages.count,
            pages=scheduler.pages.count,
        )

    def _note_drafts(self, drafts: list[SequenceResult]) -> None:
        self._drafts += len(drafts)
        for result in drafts:
            self._drafted += result.drafted
            self._accepted += result.accepted
            self._drafted_at[: result.max_accepted] += 1
            self._accepted_at[: result.accepted] += 1
        self._drafted_from += _by_source([result.sources for result in drafts])
        self._accepted_from += _by_source([result.sources[result.kept] for result in drafts])

    def _corpus(self) -> CorpusFigures | None:
        # The embedded drafter alone has one: of the others some remember nothing, and some elsewhere.
        corpus = getattr(self._engine.drafter, "corpus", None)
        return None if corpus is None else CorpusFigures(corpus.tokens, corpus.capacity)


def _by_source(sources: list[np.ndarray]) -> np.ndarray:
    """How many tokens there are of each, int64; a remote drafter may name some that nobody knows."""
    return np.bincount(np.concatenate(sources), minlength=len(SOURCES))[: len(SOURCES)]
