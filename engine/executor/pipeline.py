"""The pipelined loop: a step is begun before it is known what the one before it produced.

    plain        draft s | forward s | read s, commit s | draft s+1 | forward s+1 | read s+1, commit s+1
    pipelined    device    forward s               | forward s+1             | forward s+2
                 host      draft s+1, read and commit s-1 | draft s+2, read and commit s | ...

Where that pays more, the next step is begun when the one before it is known, see `pace.py`; both ways the same is run.

The device carries the sequences' true lengths, last tokens and page tables, see `engine.executor.kernels`;
the host goes by the most that may have been committed when it hands out pages, and by what it
knows when it drafts. A sequence that has
ended, was cancelled or lost its pages meanwhile may be in one step more, of which nothing is taken. What such a step
still writes comes before anything that a later owner of its pages does.

Prompts up to their last token run as in the plain loop, between the steps of fixed shapes. While a request runs that
`needs_host`, all of them run in the plain loop. Outputs are the same. Of a step's times `forward` is its launch, and
`verify` the waiting for the one before.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.fixed import StepShape
from engine.config import EngineConfig
from engine.engine import Engine, StepReport
from engine.executor.batch import build_batch
from engine.executor.device_state import DeviceState
from engine.executor.eager import Runner
from engine.executor.graph import FixedStep, Orders, Result
from engine.executor.pace import Pace
from engine.executor.shapes import Captured, StepGrid
from engine.executor.transfer import Arriving, CopyStream
from engine.models.config import ModelConfig
from engine.models.detokenize import Decode
from engine.scheduling.pages import PagePool
from engine.scheduling.request_slots import Seats
from engine.scheduling.sequence import NO_TOKENS, Sequence
from engine.scheduling.times import Stopwatch
from engine.speculation.overlap import furthest
from engine.speculation.prepared import PreparedDrafting, PreparedPath
from engine.speculation.token_budget import Asking, Budget
from ssd.types import Drafter


class UnderWay(NamedTuple):
    """A step whose results are not known yet."""

    sequences: list[Sequence]
    paths: list[PreparedPath]
    most: list[int]
    """Tokens that each may append."""
    results: Arriving
    tokens: int
    """That it runs, and of prompts those that run before it and behind the step before."""
    asking: Asking | None
    """For its drafts; how long is known when the step before has ended."""


class Ended(NamedTuple):
    """A step whose results are known."""

    report: StepReport
    looked_up: int
    """Of the accepted draft tokens, those that the device found itself."""


class PipelinedEngine(Engine):
    """Runs one step ahead of what it knows."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        runner: Runner,
        pages: PagePool,
        drafter: Drafter,
        grid: StepGrid,
        decode: Decode | None = None,
        budget: Budget | None = None,
        pace: Pace | None = None,
    ) -> None:
        """grid: of which the state has a seat for each sequence that may run. For the others see `Engine`."""
        super().__init__(model, config, runner, pages, drafter, decode, budget)
        self._drafting = self._prepared = PreparedDrafting(drafter, config, model.vocab_size, budget)
        self._seats = Seats(grid.state)
        self._grid = grid
        self._pace = Pace() if pace is None else pace
        self._under_way: UnderWay | None = None
        self._prompt_tokens = 0
        """Run since a step was begun last."""

    @property
    def captured(self) -> Captured:
        """What the start has captured; nothing but on a CUDA device."""
        return self._grid.captured

    def step(self) -> StepReport:
        """Begin a step, and commit what the one before it produced; in which order, see `Pace`."""
        watch = Stopwatch()
        before, self._under_way = self._under_way, None
        ended = None
        if before is not None and self._pace.waits:
            ended = self._end_step(before, watch)
        for sequence in self.scheduler.admit():
            self._drafting.introduce(sequence)
        watch.lap("schedule")
        if not any(sequence.request.sampling.needs_host for sequence in self.scheduler.running):
            self._begin_step(before, watch)
        elif before is None:
            self._seats.clear_but([])
            return super().step()
        if before is None:
            return StepReport(times=watch.times())
        if ended is None:
            ended = self._end_step(before, watch)
            ended.report.has_next = self._under_way is not None
        ended.report.times = watch.times()
        if ended.report.outcomes:  # else it ran for nobody who is still here
            self._note(before, ended)
        return ended.report

    def _begin_step(self, before: UnderWay | None, watch: Stopwatch) -> None:
        """Begin one if there is anything to run."""
        # One whose every token is on its way has nothing left to run.
        going = [one for one in self.scheduler.schedule() if one.room > min(one.in_flight, 1)]
        self._seats.clear_but(self.scheduler.running)
        watch.lap("schedule")
        self._prompt_tokens += self._run_prompts(going)
        watch.lap("forward")
        producing = [sequence for sequence in going if sequence.completes_prompt]
        if producing:
            begun = self._begin(producing, watch)
            # As long as the device is not done with the step before, asking costs nothing.
            if begun.asking is not None and (before is None or before.results.has_come):
                begun = begun._replace(asking=begun.asking._replace(seconds=watch.times().draft))
            self._under_way = begun
            self._prompt_tokens = 0

    def _note(self, step: UnderWay, ended: Ended) -> None:
        """Let it be known what came of a step. What has passed in this call is about the time from the end of the step
        before it to its own, and so of all that was launched in between.
        """
        times, accepted = ended.report.times, sum(outcome.accepted for outcome in ended.report.outcomes)
        # Where launching is not waiting, it is the host's part as well.
        launching_s = times.forward if self._grid.state.lengths.is_cuda else 0.0
        host_s = times.schedule + times.draft + times.commit + launching_s
        # What the device finds itself it finds at either pace.
        self._pace.note(host_s, times.total, accepted - ended.looked_up, ended.report.committed)
        if self._budget is not None:
            count = len(step.sequences)
            self._budget.note(step.tokens, count, accepted, times.total, step.asking, ended.looked_up)

    def _run_prompts(self, sequences: SequenceOf[Sequence]) -> int:
        """Run what is scheduled of prompts but their last tokens, which produce; returns how many tokens that was."""
        prompts = [one for one in sequences if one.scheduled > 1 or not one.completes_prompt]
        if not prompts:
            return 0
        last_tokens = [int(sequence.completes_prompt) for sequence in prompts]
        for sequence, left in zip(prompts, last_tokens, strict=True):
            sequence.draft, sequence.tree = NO_TOKENS, None
            sequence.scheduled -= left
        batch = build_batch(prompts, self.scheduler.pages.page_size)
        self._runner.forward(batch)
        for sequence, left in zip(prompts, last_tokens, strict=True):
            sequence.computed += sequence.scheduled
            self.scheduler.keep(sequence)
            sequence.scheduled = left
        return len(batch.tokens)

    def _begin(self, sequences: list[Sequence], watch: Stopwatch) -> UnderWay:
        """Launch a step that runs each one's last token, whichever that is, and a draft behind it."""
        seats = [self._seats.of(sequence) for sequence in sequences]
        self._seats.add_pages(sequences)
        watch.lap("schedule")
        paths, asking = self._prepared.prepare(sequences)
        watch.lap("draft")
        orders = Orders(
            seats=seats,
            paths=[path.tokens for path in paths],
            lengths=[path.length for path in paths],
            most=[path.most for path in paths],
            spare=[path.spare for path in paths],
            contexts=[sequence.end - 1 for sequence in sequences],
        )
        kind = self._grid.kind_of([sequence.request.sampling for sequence in sequences], self.model.vocab_size)
        results = self._grid.run(orders, kind)
        most = [1 + max(path.most, path.spare) for path in paths]
        for sequence, count in zip(sequences, most, strict=True):
            sequence.in_flight += count
        watch.lap("forward")
        return UnderWay(sequences, paths, most, results, sum(most) + self._prompt_tokens, asking)

    def _end_step(self, step: UnderWay, watch: Stopwatch) -> Ended:
        """Wait for a step's results, and commit those of sequences that still are what they were."""
        self._seats.clear_but(self.scheduler.running)
        rows = step.results.read()
        watch.lap("verify")
        report = StepReport()
        ended = zip(step.sequences, step.paths, step.most, Result.of_rows(rows), strict=False)
        here = [one for one in ended if one[0] in self._seats]
        self._prepared.note([path for _, path, _, _ in here], [result for _, _, _, result in here])
        for sequence, path, most, result in here:
            sequence.in_flight -= most
            self._prepared.verified(sequence, path, result)
            sequence.tree, sequence.scheduled = None, 1
            self._append(report, sequence, result.tokens, np.arange(len(result.tokens)), None)
        watch.lap("commit")
        return Ended(report, sum(len(result.tokens) - 1 for *_, result in here if result.is_found))


def build_grid(model: ModelConfig, config: EngineConfig, runner: Runner, pages: PagePool, device: str) -> StepGrid:
    """The state of an engine with these settings and the steps on it, to be captured on a CUDA device. The cache that
    `runner` has is one page larger than `pages`, for padding.
    """
    longest = model.max_positions
    most_pages = pages.pages_for(longest)
    state = DeviceState.empty(config.max_sequences, longest, most_pages, pages.count, torch.device(device))

    copies = CopyStream(state.lengths.device)

    def make(sequences: int, rows: int) -> FixedStep:
        shape = StepShape(sequences, rows, 1 + config.max_draft, most_pages)
        return FixedStep(runner.fixed(shape), state, shape, furthest(config.max_draft), pages.page_size, copies)

    return StepGrid(make, state, config.max_sequences, config.max_draft)
