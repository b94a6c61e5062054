"""The engine's loop: plan a step, propose drafts, launch it, commit its results.

    none in flight   device  step 1 |                   | step 2 |                   | step 3
                     host           | commit 1, draft 2 |        | commit 2, draft 3 |
    one in flight    device  step 1   | step 2             | step 3
                     host    launch 2 | commit 1, launch 3 | commit 2, launch 4

A step is launched while another one is in flight if the graph executor runs it and no drafts are made from the results:
the device drafts, or nothing is drafted. The host then plans with upper bounds of the number of tokens that the step in
flight commits. A sequence that has ended, was cancelled or was preempted may be part of one more step; its results are
dropped. That step's writes to the KV cache precede all writes of later owners of the same pages.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from engine.config import ContextWindow, EngineConfig
from engine.drafters.base import Drafter
from engine.drafters.device_chain import DeviceChain
from engine.drafters.draft_forward import DraftForward
from engine.drafters.tokens import adapt
from engine.executor.build import Executor, Executors, InFlightStep, build_executors, with_kv_memory
from engine.executor.graph import GraphStep
from engine.executor.shapes import Captured
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.lora.pool import AdapterPool
from engine.models.tokenizer import Decode
from engine.models.weights import Source, check_weights, overwrite_weights
from engine.sampling.grammar_state import GrammarCompiler
from engine.sampling.stopping import Cut
from engine.scheduling.draft_usage import is_predicted
from engine.scheduling.intake import Intake
from engine.scheduling.kernels import ENDED, FULL, UNDECIDED, Counts, commit_results
from engine.scheduling.plan import StepPlan
from engine.scheduling.report import StepReport, Stopwatch
from engine.scheduling.request import Completion, FinishReason, Request, SamplingParams
from engine.scheduling.result import StepResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.table import COMPUTED, IN_FLIGHT
from engine.scheduling.turns import Turns
from engine.speculation.selection import DeviceDrafting, DraftSelection
from engine.speculation.speculation import Speculation
from ssd.errors import Failures, UserError

if TYPE_CHECKING:
    from engine.drafters.registry import AnyDrafter

LOG = logging.getLogger(__name__)
COMMON_SAMPLING = SamplingParams(temperature=1.0)
"""Settings that most requests are assumed to have; their CUDA graphs are captured at start."""


class Engine:
    """Runs requests to completion with continuous batching."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        executors: Executors,
        drafter: Drafter,
        decode: Decode | None = None,
        selection: DraftSelection | None = None,
        *,
        drafters: Collection[str] = (),
        grammars: GrammarCompiler | None = None,
        adapters: Collection[str] = (),
        models: SequenceOf[Decoder] = (),
    ) -> None:
        """`decode`: the tokenizer's decoder; without it, requests with stop strings are refused. `selection`: selects
        the draft tokens to verify; without it, all are verified. `drafters`: names of the loaded kinds, from which
        requests may choose. `grammars`: without it, requests with a grammar are refused. `adapters`: names of the
        LoRA adapters, from which requests may choose. `models`: the model and the drafter's copies of it, for
        `update_weights`.
        """
        graph, plain_curve = executors.graph, executors.plain_curve
        self.model = model
        self.version = 0
        """Version of the weights, see `update_weights`."""
        self._models = models
        self._config = config
        self._executor = executors.eager
        self._graph = graph
        self._may_run_ahead = graph is not None and config.in_flight != 0
        self._device_drafting = None if plain_curve is None else DeviceDrafting(plain_curve)
        self._speculation = Speculation(drafter, config, model.vocab_size, selection, self._device_drafting)
        # Durations of steps say nothing about drafts if there are none.
        self._selection = selection if self._speculation.may_draft else None
        extra_rows = self._speculation.drafter.needs.extra_rows
        ahead = 0 if graph is None else graph.draft_ahead
        self.scheduler = Scheduler(config, executors.pages, extra_rows, ahead)
        self._grammars = grammars
        self._intake = Intake(
            model, config, executors.pages, decode=decode, drafters=drafters, grammars=grammars, adapters=adapters
        )
        self._in_flight: deque[InFlightStep] = deque()
        """Launched steps, the oldest first."""
        self._launched: list[StepPlan] = []
        """Plans that the current call of `step` has launched."""
        self._ended: list[tuple[Sequence, Cut]] = []
        """Sequences whose output has ended, and whose pages and rows are not free yet."""
        self._finished: dict[int, Completion] = {}
        """Completions that no report has yet."""
        self._end_tokens = np.array(model.eos_token_ids, np.uint32)
        self._read_at = 0.0
        """When the last results were read, by `time.perf_counter`."""
        self._next_id = 0
        self._turns = Turns()
        """Held while a thread changes the engine's state."""
        self._reports: deque[StepReport] = deque()
        """Reports of steps that `update_weights` has run and `step` has not returned."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to run or to return."""
        return bool(self._reports) or self.scheduler.has_work

    @property
    def max_draft(self) -> int:
        """Largest number of draft tokens of a sequence in a step."""
        return self._config.max_draft

    @property
    def drafter(self) -> Drafter:
        """The drafter in use; one of tokens is wrapped."""
        return self._speculation.drafter.inner

    @property
    def drafter_failures(self) -> Failures:
        """The failures of the drafter."""
        return self._speculation.drafter.failures

    @property
    def captured(self) -> Captured:
        """The CUDA graphs that were captured when the engine was built."""
        return Captured(0, 0.0) if self._graph is None else self._graph.grid.captured

    def device_drafting_s(self, sequences: int) -> float | None:
        """Measure the seconds that drafting adds to a step of `sequences` sequences, while no request runs.

        Returns None if the host drafts: then the drafting is part of each `StepReport.times`.
        """
        if self._graph is None or self._graph.chain is None:
            return None
        return self._graph.grid.drafting_s(sequences)

    def add(self, request: Request) -> int:
        """Queue a request and return the id of its completion. Raises UserError for a request that cannot run."""
        return self._queue(request).sequence_id

    def check(self, request: Request) -> int:
        """Return the largest number of tokens, prompt and output, that a request may reach.

        Raises UserError for a request that cannot run.
        """
        return self._intake.check(request)[0]

    def completed(self, request: Request, output: np.ndarray) -> Completion | None:
        """Return the completion of a request without running it, given the output of an equal request, uint32 [n].

        Returns None if the output does not end exactly there, or depends on drafts.
        """
        sequence = self._intake.sequence(self._next_id, request)
        cut = sequence.stopping.cut(output, sequence.room)
        if cut.reason is None or cut.length < len(output) or sequence.request.sampling.uses_rejection:
            return None
        sequence.commit(output)
        return replace(sequence.complete(cut), steps=0, is_repeat=True)

    def step(self) -> StepReport:
        """Run one step. Each running sequence advances by at least one token or by a chunk of its prompt."""
        with self._turns:
            return self._reports.popleft() if self._reports else self._step()

    def _step(self) -> StepReport:
        watch = Stopwatch()
        self._launched = []
        if self._in_flight and not self._in_flight[0].plan.is_running:
            self._in_flight.popleft()
        report = self._run(watch) if self._in_flight or self._launch(watch) else StepReport()
        report.times = watch.times()
        return report

    def _run(self, watch: Stopwatch) -> StepReport:
        """Commit the oldest step in flight, and launch the next one: before, if it does not depend on the results."""
        step, last_read = self._in_flight[0], self._read_at
        is_ahead = self._can_run_ahead and self._launch(watch)
        self._in_flight.popleft()
        result = step.result()
        watch.lap("verify")
        self._read_at = perf_counter()
        # Its drafts were made in this time, but its results are observed after it.
        seconds = self._read_at - max(step.plan.began, last_read) - step.plan.drafting_s
        report = self._commit(result, watch)
        if isinstance(step, GraphStep) and not self._in_flight and not step.plan.drafts_on_device:
            # The device runs the next step while this one is accounted for, here and by the caller.
            self._launch(watch)
        if result.counts.filled:
            self.scheduler.register_rows(step.plan.rows)
        if self._ended:
            self._finish_ended()
        report.finished, self._finished = self._finished, {}
        report.is_ahead = is_ahead
        if report.committed:
            self._record(step.plan, report, seconds)
        watch.lap("commit")
        return report

    def cancel(self, sequence_id: int) -> Completion | None:
        """End a request between two steps and return its completion: the tokens so far, with the reason ABORT.

        Returns None if there is no such request or it has ended.
        """
        with self._turns:
            sequence = self.scheduler.find(sequence_id)
            if sequence is None:
                return None
            return self._finish(sequence, Cut(0, FinishReason.ABORT))

    def update_weights(
        self,
        source: Source,
        *,
        version: int | None = None,
        observe: Callable[[StepReport], None] | None = None,
    ) -> None:
        """Replace the weights of the model between two steps; requests that begin later run with the new ones.

        source: a state dict with the names of the checkpoint, float tensors of any float dtype on any device; or the
        path of a safetensors file, or of a folder of such files. Neither may change during the call. version: the new
        `Engine.version`, an int >= 0; None: one more than before. observe: called with the reports of the steps that
        this takes; by default the following calls of `step` return them.

        Blocks until the new weights are in use, and may be called from another thread than `step`. Requests that have
        begun end with the old weights, and meanwhile no other begins. The prefix cache is emptied; what drafters have
        learned from text stays. Draft heads and draft models keep their own weights; parts that they share with the
        target change with it. Engines with the same model get the weights too, so they must be idle and have no prefix
        cache. Raises UserError for weights that do not fit, before anything changes, and for a model that cannot
        change, see `check_weights`.
        """
        if version is not None and version < 0:
            raise UserError(f"version must be at least 0, not {version}")
        weights = check_weights(self._models[0], source)
        with self._turns:
            if self.scheduler.is_draining:
                raise UserError("another update of the weights is under way; wait until it is complete")
            self._drain(observe or self._reports.append)
            self.scheduler.pages.forget()
            for model in self._models:
                overwrite_weights(model, weights)
            self.drafter.weights_changed()
            self.version = self.version + 1 if version is None else version

    def _drain(self, observe: Callable[[StepReport], None]) -> None:
        """End all requests that have begun, so that no step is in flight and no page is in use."""
        self.scheduler.is_draining = True
        try:
            while self.scheduler.begun:
                observe(self._step())
        finally:
            self.scheduler.is_draining = False
        self._in_flight.clear()
        if self._graph is not None:
            self._graph.release(self.scheduler.table)

    def generate(
        self, requests: Iterable[Request], observe: Callable[[StepReport], None] = lambda _: None
    ) -> list[Completion]:
        """Run requests and return their completions in the same order.

        `observe` is called with the report of each step; it may cancel requests, whose completions have the reason
        ABORT. Raises UserError if one of the requests cannot run: before any of them starts, or when its grammar cannot
        continue. After an exception, also one that `observe` raises, all requests are cancelled.
        """
        requests = list(requests)
        for request in requests:
            self.check(request)
        sequences = [self._queue(request) for request in requests]
        completions: dict[int, Completion] = {}
        try:
            while self.has_work:
                report = self.step()
                if report.refused:
                    raise UserError(next(iter(report.refused.values())))
                completions.update(report.finished)
                observe(report)
        except BaseException:
            for sequence in sequences:
                self.cancel(sequence.sequence_id)
            # An interrupted step may leave sequences that have ended.
            with self._turns:
                self._finish_ended()
            raise
        cancelled = Cut(0, FinishReason.ABORT)
        return [completions.get(sequence.sequence_id) or sequence.complete(cancelled) for sequence in sequences]

    @property
    def window(self) -> ContextWindow:
        """Largest number of tokens of a prompt and its output together."""
        return self._intake.window

    def prepare_grammars(self) -> None:
        """Read what requests with a grammar need; otherwise the first one delays all others."""
        if self._grammars is not None:
            self._grammars.prepare()

    def close(self) -> None:
        """Release the drafter."""
        self._speculation.close()

    def _queue(self, request: Request) -> Sequence:
        with self._turns:
            sequence = self._intake.sequence(self._next_id, request)
            self.scheduler.add(sequence)
            self._next_id += 1
            return sequence

    @property
    def _can_run_ahead(self) -> bool:
        """Whether the next step may be launched before the results of the one in flight are read."""
        step = self._in_flight[0]
        # After a step with the host's drafts, the next one nearly always has some, too.
        has_drafts = step.plan.is_drafting and not step.plan.drafts_on_device
        return isinstance(step, GraphStep) and not has_drafts and self._may_run_ahead

    def _launch(self, watch: Stopwatch) -> bool:
        """Plan and launch a step; return whether one was launched.

        After another launch in the same call of `step`, none is launched if there is nothing to run, or if the next
        step needs the host or drafts that depend on results that are not known.
        """
        began = perf_counter()
        if self._ended and self.scheduler.is_short:
            self._finish_ended()
        plan = self.scheduler.plan()
        plan.began = began
        watch.lap("schedule")
        executor = self._executor_for(plan)
        is_on_graph = executor is self._graph
        if not len(plan) or ((self._in_flight or self._launched) and not is_on_graph):
            return False
        if self._in_flight and plan.needs_host:
            return False
        self._speculation.start(self.scheduler.take_admitted())
        watch.lap("draft")
        if self._graph is not None and is_on_graph and self._graph.chain is not None:
            self._speculation.leave_to_device(plan)
            watch.lap("draft")
        elif self._in_flight:
            is_drafting = self._speculation.prepare(plan)
            watch.lap("draft")
            if is_drafting:
                return False
        else:
            self._speculation.propose(plan)
            watch.lap("draft")
        self._in_flight.append(executor.launch(plan))
        self._launched.append(plan)
        watch.lap("forward")
        self._count_launched(plan, is_on_graph=is_on_graph)
        return True

    def _count_launched(self, plan: StepPlan, *, is_on_graph: bool) -> None:
        """Note what a launched step computes."""
        # The last committed token counts as computed once the next token is known.
        state = self.scheduler.table.state
        if len(plan.chunks):
            prompts = plan.prompts
            state[prompts.all_rows, COMPUTED] += prompts.chunks
            self.scheduler.register_rows(prompts.all_rows)
        if not is_on_graph:
            state[plan.rows, IN_FLIGHT] += 1 + plan.lengths

    def _executor_for(self, plan: StepPlan) -> Executor:
        """Return the executor for a step: the graph executor, unless a request needs the host and the device drafts."""
        if self._graph is None:
            return self._executor
        if self._graph.chain is not None and self.scheduler.needs_host:
            # The eager executor advances sequences on the host only, which outdates the state on the device.
            if len(plan) and not self._in_flight and not self._launched:
                self._graph.release(self.scheduler.table)
            return self._executor
        return self._graph

    def _commit(self, result: StepResult, watch: Stopwatch) -> StepReport:
        """Commit the tokens of a step, up to the end of each output."""
        plan, table = result.plan, self.scheduler.table
        report = StepReport(result, is_backing_off=plan.is_backing_off)
        result.counts = Counts(*commit_results(
            table.state, plan.rows, plan.admissions, result.values, result.sources, plan.drafts.batch.offsets,
            plan.lengths, self._end_tokens, self.scheduler.pages.page_size, result.lengths, result.outcomes,
        ))  # fmt: skip
        for index in np.flatnonzero(result.outcomes >= ENDED).tolist() if result.counts.ending else ():
            [sequence], outcome = table.of(plan.rows[index : index + 1]), result.outcomes[index]
            cut = Cut(int(result.lengths[index]), FinishReason.LENGTH if outcome == FULL else FinishReason.STOP)
            if outcome == UNDECIDED:
                cut = self._append(sequence, result, index, report)
            if cut.reason is not None:
                self._end(sequence, cut)
        if plan.producers < len(plan):
            runs = plan.still_runs[plan.producers :]
            for sequence in table.of(plan.all_rows[plan.producers :][runs]):
                if sequence.is_scored:
                    self._end(sequence, Cut(0, FinishReason.LENGTH))
        watch.lap("commit")
        if self._graph is not None and self._graph.chain is not None and plan.drafts_on_device:
            self._graph.chain.observe(result)
        self._speculation.observe(result)
        observing_s = watch.lap("draft")
        if plan.is_drafting:
            plan.drafting_s += observing_s
        return report

    def _end(self, sequence: Sequence, cut: Cut) -> None:
        """Take a sequence whose output has ended out of the following steps; `_finish_ended` does the rest."""
        self.scheduler.stop(sequence)
        self._ended.append((sequence, cut))

    def _finish_ended(self) -> None:
        """Finish the sequences that have ended, and free their pages and rows."""
        for sequence, cut in self._ended:
            self._finished[sequence.sequence_id] = self._finish(sequence, cut)
        self._ended.clear()

    def _record(self, plan: StepPlan, report: StepReport, seconds: float) -> None:
        """Update the decisions about drafting with a step. seconds: its duration, without the host's drafting."""
        if plan.drafts_on_device:
            # Without a launch, or with two, the duration is not that of one step.
            if self._device_drafting is not None and len(self._launched) == 1:
                self._device_drafting.record(plan, self._launched[0], report.committed, seconds)
        elif self._selection is not None:
            self._selection.record(plan, report.accepted, report.committed, seconds)

    def _append(self, sequence: Sequence, result: StepResult, index: int, report: StepReport) -> Cut:
        """Commit the tokens of a sequence whose request decides where it ends."""
        tokens, cut = result.tokens_of(index), Cut(0, None)
        if len(tokens):
            cut = sequence.stopping.cut(tokens, sequence.room)
            result.add(index, cut.length)
            if (logprobs := result.logprobs.get(index)) is not None:
                result.logprobs[index] = logprobs = logprobs.part(0, cut.length)
            batch, drafted, path = result.plan.drafts.batch, result.draft_of(index), result.path_of(index)
            if sequence.request.hints is not None:
                draft = batch.tokens[drafted], batch.parents[drafted]
                continues = is_predicted(sequence.request.hints, sequence.output, *draft)
                sequence.predicted_drafted += int(continues.sum())
                sequence.predicted_accepted += int(continues[path].sum())
            sources = batch.source[drafted]
            sequence.commit(tokens[: cut.length], drafted=sources, accepted=sources[path], logprobs=logprobs)
            self.scheduler.register_pages(sequence)
        if cut.reason is None and (error := result.errors.get(index)) is not None:
            report.refused[sequence.sequence_id] = str(error)
            return Cut(0, FinishReason.ABORT)
        return cut

    def _finish(self, sequence: Sequence, cut: Cut) -> Completion:
        has_output = len(sequence.output) > 0
        learn = sequence.request.learn and has_output and cut.reason is not FinishReason.ABORT
        self._speculation.finish(sequence, learn)
        self.scheduler.remove(sequence)
        return sequence.complete(cut)


def build_engine(
    model: Decoder,
    config: EngineConfig,
    drafter: AnyDrafter,
    decode: Decode | None = None,
    *,
    has_budget: bool = False,
    attention: str = "auto",
    common: SamplingParams = COMMON_SAMPLING,
    notify: Callable[[str], None] = lambda _: None,
    warn: Callable[[str], None] = LOG.warning,
    drafters: Collection[str] = (),
    grammars: GrammarCompiler | None = None,
    adapters: AdapterPool | None = None,
) -> Engine:
    """Return an engine for a loaded model. Engines may share a model; each has its own KV cache.

    `decode`: the tokenizer's decoder, needed for stop strings. `has_budget`: measure the durations of steps for
    a few seconds and verify only draft tokens that are worth their time; otherwise all are verified.
    `attention`: as in `choose_backend`. `common`: settings that most requests are expected to have. `notify`: called
    with a progress line before and after slow preparations. `warn`: called once if drafting cannot pay. `drafters`:
    names of the kinds in `drafter`, from which requests may choose. `grammars`: needed for requests with a grammar.
    `adapters`: LoRA adapters that are attached to `model`; all steps then run on the eager executor. Raises UserError
    for an attention backend or KV cache dtype that is not available, and for a drafter that cannot be bound to the
    model.
    """
    drafter = adapt(drafter)
    with _reported(drafter):
        drafter.needs.check(model.config)

    def bind(forward: DraftForward) -> DeviceChain | None:
        with _reported(drafter):
            drafter.bind(forward)
            return drafter.device_chain(config)

    config = with_kv_memory(model, config, drafter.needs)
    measure = has_budget and config.max_draft > 0
    executors = build_executors(
        model, config, attention, common, notify, measure=measure, needs=drafter.needs, adapters=adapters, bind=bind
    )  # fmt: skip
    limits = drafter.limits._replace(depth=min(drafter.limits.depth, config.max_draft))
    selection = None if executors.curve is None else DraftSelection(executors.curve, limits, warn)
    return Engine(
        model.config, config, executors, drafter, decode, selection,
        drafters=drafters, grammars=grammars, adapters=() if adapters is None else adapters.names,
        models=(model, *drafter.copies),
    )  # fmt: skip


@contextmanager
def _reported(drafter: Drafter) -> Iterator[None]:
    """Convert an exception that a drafter raises during setup to a UserError."""
    try:
        yield
    except Exception as problem:
        name = drafter.origin.__qualname__
        raise UserError(f"the drafter {name} cannot be used: {type(problem).__name__}: {problem}") from problem
