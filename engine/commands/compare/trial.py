"""Run drafters on the same prompts: once to count tokens per step, and in alternated rounds to measure their speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np

from drafter_service.observability.measuring.rounds import Timer, alternated, columns
from engine.commands.compare.results import Condition, Figures, Output, Result, groups, run_group
from engine.commands.compare.rows import Row
from engine.commands.launch import launch
from engine.commands.options import EngineOptions
from engine.engine import Engine
from engine.models.decoder import Decoder
from engine.models.tokenizer import Tokenizer
from engine.scheduling.report import StageTimes, StepReport
from engine.scheduling.request import Completion, Request, SamplingParams
from ssd.errors import UserError

BATCH = 16
"""Number of earlier requests that run at the same time."""
INDEXING_S = 0.2
"""Pause after earlier requests, in seconds: some drafters index finished requests in the background."""
BASELINE = Row("none", "none", {}, 0, False, "path")


@dataclass(frozen=True)
class Workload:
    """The prompts of a comparison."""

    earlier: Sequence[np.ndarray]
    """uint32 [P] each: requests that drafters may learn from before they are measured."""
    measured: Sequence[np.ndarray]
    """uint32 [P] each."""
    max_tokens: int
    """Number of tokens of each output."""

    def requests_of(self, condition: Condition, *, spare: int = 0) -> list[Request]:
        """Return the measured requests; every prompt has its own seed.

        spare: number of tokens by which outputs may be longer. Drafters do not learn from measured requests, so that
        results do not depend on their order.
        """
        sampling = SamplingParams(self.max_tokens + spare, condition.temperature)
        return [
            Request(tokens, replace(sampling, seed=seed), learn=False)
            for seed, tokens in enumerate(self.measured, len(self.earlier))
        ]

    def earlier_requests(self, condition: Condition, count: int) -> list[Request]:
        """Return the first `count` of the earlier requests."""
        sampling = SamplingParams(self.max_tokens, condition.temperature)
        return [Request(tokens, replace(sampling, seed=seed)) for seed, tokens in enumerate(self.earlier[:count])]

    def earlier_count(self, row: Row, *, verifies_all: bool) -> int:
        """Return how many of the earlier requests a drafter runs.

        A batch suffices for the calibration of drafters that remember nothing else, and paths of which all tokens are
        verified do not depend on the calibration.
        """
        if row.remembers:
            return len(self.earlier)
        return 0 if verifies_all and row.shape == "path" else min(BATCH, len(self.earlier))


class Counted(NamedTuple):
    """A run that verified all draft tokens."""

    outputs: Sequence[Output]
    """Outputs with their steps."""
    step_s: float
    """Median duration of a step, without the time of drafting, in seconds."""
    drafting_s: float
    """Median duration of drafting in a step, in seconds."""
    figures: Figures


class Turn(NamedTuple):
    """Requests that were run at the same time."""

    completions: Sequence[Completion]
    wall_s: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(len(each.tokens) for each in self.completions) / self.wall_s


@dataclass(frozen=True)
class Trial:
    """A loaded target, and the workload that every drafter runs on it."""

    model: Decoder
    tokenizer: Tokenizer
    options: EngineOptions
    """Settings of the engines; drafter, draft shape, verification and concurrency are replaced."""
    workload: Workload
    warn: Callable[[str], None]
    advance: Callable[[int, str], None]
    """Called with the number of requests that a drafter has just completed, and its name."""
    observe: Callable[[StepReport], None] = lambda _: None
    """Called with the report of each step. An exception that it raises ends the trial."""

    def run(
        self, rows: Sequence[Row], condition: Condition, skip: Callable[[str, str], None]
    ) -> Iterator[list[Result]]:
        """Yield the results so far, that of the baseline first.

        Yields once for each row as soon as its tokens per step are known, and then after each timed round of all rows.

        skip: called with the name of a drafter that cannot be built, and the reason.
        """
        expected = self.count(BASELINE, replace(condition, verification="exact"))
        counted = [(BASELINE, expected)]
        for row in rows:
            try:
                counted.append((row, self.count(row, condition)))
            except UserError as problem:
                skip(row.name, f"cannot be built: {problem}")
                continue
            yield [self._result(row, own, condition, expected, (), ()) for row, own in counted]
        rounds: list[dict[int, Turn]] = []
        with self.running([row for row, _ in counted], condition) as cases:
            requests = groups(self.workload.requests_of(condition), condition.concurrency)
            for done in alternated(dict(enumerate(cases)), requests):
                rounds.append(done)
                turns = columns(rounds)
                yield [
                    self._result(row, own, condition, expected, turns[number], turns[0])
                    for number, (row, own) in enumerate(counted)
                ]

    @contextmanager
    def running(
        self, rows: Sequence[Row], condition: Condition, *, verifies_all: bool = False
    ) -> Iterator[Sequence[Callable[[list[Request]], Turn]]]:
        """Start an engine for each row, and yield functions that run requests on them.

        verifies_all: whether the engines verify all draft tokens; otherwise they have a token budget.
        """
        with ExitStack() as stack:
            cases = []
            for row in rows:
                engine = stack.enter_context(self._engine(row, condition, verifies_all=verifies_all))
                cases.append(partial(self._turn, engine, row))
            yield cases

    def _result(
        self,
        row: Row,
        own: Counted,
        condition: Condition,
        expected: Counted,
        mine: Sequence[Turn],
        plain: Sequence[Turn],
    ) -> Result:
        """Return the result of a row; mine, plain: its turns so far, and those of the baseline."""
        must_equal = condition.verification == "exact" or condition.temperature == 0
        ratios = [turn.rate / other.rate for turn, other in zip(mine, plain, strict=True)]
        return Result(
            row,
            condition,
            own.figures,
            self._is_same(own.outputs, expected.outputs, mine) if must_equal else None,
            step_ms=1e3 * own.step_s,
            drafting_ms=1e3 * own.drafting_s,
            tokens_per_s=median(turn.rate for turn in mine) if mine else None,
            speedup=median(ratios) if mine else None,
            speedup_range=(min(ratios), max(ratios)) if mine else None,
            prompts=sum(len(turn.completions) for turn in mine),
        )

    def count(self, row: Row, condition: Condition) -> Counted:
        """Run the measured requests after the earlier ones, and verify all draft tokens."""
        with self._engine(row, condition, verifies_all=True) as engine:
            times: list[StageTimes] = []

            def observe(report: StepReport) -> None:
                self.observe(report)
                if report.produced:
                    times.append(report.times)

            requests = self.workload.requests_of(condition, spare=1 + engine.max_draft)
            outputs: list[Output] = []
            for group in groups(requests, condition.concurrency):
                outputs += run_group(engine, group, self.workload.max_tokens, observe)
                self.advance(len(group), row.name)
            on_device = engine.device_drafting_s(condition.concurrency)
        figures = Figures.of(outputs, self.workload.max_tokens, has_loops=condition.temperature == 0)
        if on_device is not None:
            return Counted(outputs, median(each.total for each in times) - on_device, on_device, figures)
        drafting_s = median(each.draft for each in times)
        return Counted(outputs, median(each.total - each.draft for each in times), drafting_s, figures)

    def _turn(self, engine: Engine, row: Row, requests: list[Request]) -> Turn:
        with Timer() as timer:
            completions = engine.generate(requests, self.observe)
        self.advance(len(requests), row.name)
        return Turn(completions, timer.wall_s)

    def _is_same(self, outputs: Sequence[Output], expected: Sequence[Output], turns: Sequence[Turn]) -> bool:
        """Return whether the outputs of both runs of a row are the expected ones; the second may not be complete."""
        length = self.workload.max_tokens
        timed = (completion.tokens.tolist() for turn in turns for completion in turn.completions)
        found = [*(output.tokens for output in outputs), *timed]
        pairs = zip(found, [*expected, *expected], strict=False)
        return all(tokens[:length] == other.tokens[:length] for tokens, other in pairs)

    @contextmanager
    def _engine(self, row: Row, condition: Condition, *, verifies_all: bool) -> Iterator[Engine]:
        """Build the engine of a row, and let all but the baseline's run the earlier requests."""
        options = replace(
            self.options,
            drafter=row.drafter,
            drafter_options=row.options,
            draft_shape=row.shape,
            verification=condition.verification,
            max_sequences=max(BATCH, condition.concurrency),
        )

        during = ""

        def warn(text: str) -> None:
            self.warn(f"{row.name}{during}: {text}")

        built = launch(self.model, self.tokenizer, options, warn, notify=lambda _: None, verifies_all=verifies_all)
        with closing(built) as engine:
            count = 0 if row is BASELINE else self.workload.earlier_count(row, verifies_all=verifies_all)
            during = ", in the earlier requests"
            for group in groups(self.workload.earlier_requests(condition, count), BATCH):
                self._turn(engine, row, group)
            during = ""
            time.sleep(INDEXING_S if count and row.remembers else 0)
            yield engine
