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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from engine.config import ContextWindow, EngineConfig
from engine.drafters.base import Drafter
from engine.drafters.draft_forward import DraftForward
from engine.drafters.model_based.device_chain import DeviceChain
from engine.drafters.sources import DraftSource
from engine.drafters.tokens import adapt, innermost, limits_of
from engine.executor.base import Executor, InFlightStep
from engine.executor.build import Executors, build_executors, with_kv_memory
from engine.executor.graph import GraphStep
from engine.executor.shapes import Captured
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.detokenize import Decode
from engine.models.lora.pool import AdapterPool
from engine.models.weights import Source, check_weights, overwrite_weights
from engine.sampling.grammar_state import GrammarCompiler
from engine.sampling.stopping import Cut
from engine.scheduling.draft_usage import is_predicted
from engine.scheduling.intake import Intake
from engine.scheduling.plan import SequenceResult, StepPlan
from engine.scheduling.request import Completion, FinishReason, Request, SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.times import StageTimes, Stopwatch
from engine.scheduling.turns import Turns
from engine.speculation.device_drafting import DeviceDrafting
from engine.speculation.selection import DraftSelection
from engine.speculation.speculation import Speculation
from ssd.errors import Failures, UserError

if TYPE_CHECKING:
    from engine.drafters.kinds import AnyDrafter

LOG = logging.getLogger(__name__)
COMMON_SAMPLING = SamplingParams(temperature=1.0)
"""Settings that most requests are assumed to have; their CUDA graphs are captured at start."""


@dataclass
class StepReport:
    """Results and timing of one step."""

    results: list[SequenceResult] = field(default_factory=list)
    """One per sequence that produced tokens."""
    finished: dict[int, Completion] = field(default_factory=dict)
    """Completions by the ids that `Engine.add` returned."""
    refused: dict[int, str] = field(default_factory=dict)
    """Reasons why requests in `finished` were aborted: an adapter cannot be read, or a grammar cannot continue."""
    restarted: list[int] = field(default_factory=list)
    """Requests whose output so far was dropped, because the weights changed."""
    times: StageTimes = field(default_factory=StageTimes)
    """Durations of the stages."""
    is_ahead: bool = False
    """Whether the next step was launched before the results of this one were read."""
    is_backing_off: bool = False
    """Whether the drafter was not called because drafting was not worthwhile recently."""

    @property
    def tokens(self) -> dict[int, np.ndarray]:
        """Committed tokens by the ids that `Engine.add` returned."""
        return {result.sequence_id: result.tokens for result in self.results}

    @property
    def committed(self) -> int:
        """Number of committed tokens."""
        return sum(len(result.tokens) for result in self.results)


class Engine:
    """Runs requests to completion with continuous batching."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        executors: Executors,
        drafter: AnyDrafter,
        decode: Decode | None = None,
        selection: DraftSelection | None = None,
        *,
        drafters: Collection[str] = (),
        grammars: GrammarCompiler | None = None,
        adapters: AdapterPool | None = None,
        models: SequenceOf[Decoder] = (),
    ) -> None:
        """`decode`: the tokenizer's decoder; without it, requests with stop strings are refused. `selection`: selects
        the draft tokens to verify; without it, all are verified. `drafters`: names of the loaded kinds, from which
        requests may choose. `grammars`: without it, requests with a grammar are refused. `adapters`: LoRA adapters,
        from which requests may choose. `models`: the model and the drafter's copies of it, for `update_weights`.
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
        self._selection = selection
        self._device_drafting = None if plain_curve is None else DeviceDrafting(plain_curve)
        self._speculation = Speculation(drafter, config, model.vocab_size, selection, self._device_drafting)
        extra_rows = self._speculation.drafter.needs.extra_rows
        ahead = 0 if graph is None else graph.draft_ahead
        self.scheduler = Scheduler(config, executors.pages, extra_rows, ahead, adapters)
        self._adapters = adapters
        self._grammars = grammars
        self._intake = Intake(
            model, config, executors.pages, decode=decode, drafters=drafters, grammars=grammars,
            adapters=() if adapters is None else adapters.names,
        )  # fmt: skip
        self._in_flight: deque[InFlightStep] = deque()
        """Launched steps, the oldest first."""
        self._launched: list[StepPlan] = []
        """Plans that the current call of `step` has launched."""
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
    def drafter(self) -> object:
        """The drafter that was passed to the constructor."""
        return innermost(self._speculation.drafter)

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
        return self._intake.longest(request)

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
        if self._in_flight and not any(entry.sequence.is_running for entry in self._in_flight[0].plan.entries):
            self._in_flight.popleft()
        if not self._in_flight and not self._launch(watch):
            report = StepReport(times=watch.times())
        else:
            is_ahead = self._can_run_ahead and self._launch(watch)
            report = self._commit(self._in_flight.popleft(), watch)
            report.is_ahead = is_ahead
        self._end_refused(report)
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
        running: Literal["finish", "restart"] = "finish",
        observe: Callable[[StepReport], None] | None = None,
    ) -> None:
        """Replace the weights of the model between two steps; requests that begin later run with the new ones.

        source: a state dict with the names of the checkpoint, float tensors of any float dtype on any device; or the
        path of a safetensors file, or of a folder of such files. Neither may change during the call. version: the new
        `Engine.version`, an int >= 0; None: one more than before. running: what happens to requests that have begun.
        `finish`: they end with the old weights, and meanwhile no other begins. `restart`: their output is dropped, and
        they begin again. observe: called with the reports of the steps that this takes; by default the following calls
        of `step` return them.

        Blocks until the new weights are in use, and may be called from another thread than `step`. The prefix cache is
        emptied; what drafters have learned from text stays. Draft heads and draft models keep their own weights; parts
        that they share with the target change with it. Engines with the same model get the weights too, so they must
        be idle and have no prefix cache. Raises UserError for weights that do not fit, before anything changes, and for
        a model that cannot change, see `check_weights`.
        """
        if running not in ("finish", "restart"):
            raise UserError(f"running must be 'finish' or 'restart', not {running!r}")
        if version is not None and version < 0:
            raise UserError(f"version must be at least 0, not {version}")
        weights = check_weights(self._models[0], source)
        with self._turns:
            if self.scheduler.is_draining:
                raise UserError("another update of the weights is under way; wait until it is complete")
            self._drain(running == "restart", observe or self._reports.append)
            self.scheduler.pages.forget()
            for model in self._models:
                overwrite_weights(model, weights)
            if (adapt_to_weights := getattr(self.drafter, "weights_changed", None)) is not None:
                adapt_to_weights()
            self.version = self.version + 1 if version is None else version

    def _drain(self, restart: bool, observe: Callable[[StepReport], None]) -> None:
        """End or restart all requests that have begun, so that no step is in flight and no page is in use."""
        if restart and (begun := self.scheduler.begun):
            for sequence in begun:
                self._speculation.finish(sequence, learn=False)
                self.scheduler.remove(sequence)
                sequence.begin_again(self._intake.sequence(sequence.sequence_id, sequence.request))
                self.scheduler.add(sequence)
            observe(StepReport(restarted=[sequence.sequence_id for sequence in begun]))
        self.scheduler.is_draining = True
        try:
            while self.scheduler.begun:
                observe(self._step())
        finally:
            self.scheduler.is_draining = False
        self._in_flight.clear()
        if self._graph is not None:
            self._graph.release()

    def generate(
        self, requests: Iterable[Request], observe: Callable[[StepReport], None] = lambda _: None
    ) -> list[Completion]:
        """Run requests and return their completions in the same order.

        `observe` is called with the report of each step; it may cancel requests, whose completions have the reason
        ABORT. Raises UserError if one of the requests cannot run: before any of them starts, or when its adapter cannot
        be read or its grammar cannot continue. After an exception, also one that `observe` raises, all requests are
        cancelled.
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
        """Release the drafter and the adapters."""
        self._speculation.close()
        if self._adapters is not None:
            self._adapters.close()

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
        return self._may_run_ahead and isinstance(step, GraphStep) and not has_drafts

    def _launch(self, watch: Stopwatch) -> bool:
        """Plan and launch a step; return whether one was launched.

        With a step in flight, none is launched if there is nothing to run, or if the next step needs the host or drafts
        that it makes.
        """
        plan = self.scheduler.plan()
        watch.lap("schedule")
        executor = self._executor_for(plan)
        if not plan.entries or (self._in_flight and executor is not self._graph):
            return False
        if self._graph is not None and executor is self._graph and self._graph.chain is not None:
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
        for entry in plan.entries:
            # The last committed token counts as computed once the next token is known.
            ahead = entry.scheduled - entry.produces
            if ahead:
                entry.sequence.computed += ahead
                self.scheduler.register_pages(entry.sequence)
            if entry.produces:
                entry.sequence.in_flight += 1 + entry.max_verified
        return True

    def _executor_for(self, plan: StepPlan) -> Executor:
        """Return the executor for a step: the graph executor if no running request needs the host."""
        if self._graph is None:
            return self._executor
        if any(self._needs_host(sequence) for sequence in self.scheduler.running):
            # The eager executor advances sequences on the host only, which outdates the state on the device.
            if plan.entries and not self._in_flight:
                self._graph.release()
            return self._executor
        return self._graph

    def _needs_host(self, sequence: Sequence) -> bool:
        sampling = sequence.request.sampling
        verification = sampling.verification or self._config.verification
        return sampling.needs_host or (verification == "rejection" and sampling.is_sampled)

    def _commit(self, step: InFlightStep, watch: Stopwatch) -> StepReport:
        """Wait for a step, commit its tokens, and finish the sequences whose output ends."""
        result = step.result()
        watch.lap("verify")
        report = StepReport(is_backing_off=result.plan.is_backing_off)
        ended: list[tuple[Sequence, Cut]] = []
        running = [each for each in result.results if each.plan.sequence.is_running]
        # Drafters do not observe a sequence whose output could not be continued.
        result.results = [each for each in running if each.error is None or len(each.tokens)]
        for each in running:
            cut = Cut(0, None)
            if len(each.tokens):
                each.plan.sequence.in_flight -= 1 + each.plan.max_verified
                cut = self._append(each)
                report.results.append(each)
            if each.plan.sequence.is_scored:
                cut = Cut(0, FinishReason.LENGTH)
            if cut.reason is None and each.error is not None:
                cut = Cut(0, FinishReason.ABORT)
                report.refused[each.sequence_id] = str(each.error)
            if cut.reason is not None:
                ended.append((each.plan.sequence, cut))
        watch.lap("commit")
        if self._graph is not None and self._graph.chain is not None and result.plan.drafts_on_device:
            self._graph.chain.observe(result)
        self._speculation.observe(result)
        observing_s = watch.lap("draft")
        if result.plan.is_drafting:
            result.plan.drafting_s += observing_s
        for sequence, cut in ended:
            report.finished[sequence.sequence_id] = self._finish(sequence, cut)
        watch.lap("commit")
        report.times = watch.times()
        if report.results:
            self._record(step.plan, report)
        return report

    def _record(self, plan: StepPlan, report: StepReport) -> None:
        """Update the decisions about drafting with the duration of a step."""
        times = report.times
        if plan.drafts_on_device:
            # Without a launch, or with two, the duration is not that of one step.
            if self._device_drafting is not None and len(self._launched) == 1:
                self._device_drafting.record(plan, self._launched[0], report.committed, times.total)
        elif self._selection is not None:
            accepted = sum(each.accepted for each in report.results)
            forced = sum(int((each.accepted_sources == DraftSource.GRAMMAR).sum()) for each in report.results)
            # While the next step runs, the drafter does not delay the device.
            seconds = times.total if self._in_flight else times.total - times.draft
            self._selection.record(plan, accepted - forced, report.committed, seconds)

    def _append(self, result: SequenceResult) -> Cut:
        """Commit the tokens that a step produced for a sequence, up to the end of its output."""
        sequence = result.plan.sequence
        cut = sequence.stopping.cut(result.tokens, sequence.room)
        if cut.length < len(result.tokens):
            result.tokens = result.tokens[: cut.length]
            result.kept = result.kept[: cut.length]
            if result.logprobs is not None:
                result.logprobs = result.logprobs.part(0, cut.length)
        if sequence.request.hints is not None:
            continues = is_predicted(sequence.request.hints, sequence.output, result.plan.draft, result.plan.parents)
            sequence.predicted_drafted += int(continues.sum())
            sequence.predicted_accepted += int(continues[result.kept].sum())
        sequence.commit(
            result.tokens, drafted=result.sources, accepted=result.accepted_sources, logprobs=result.logprobs
        )
        self.scheduler.register_pages(sequence)
        return cut

    def _end_refused(self, report: StepReport) -> None:
        """Abort the sequences that the scheduler removed because their adapter cannot be read."""
        for sequence, problem in self.scheduler.refused:
            self._speculation.finish(sequence, learn=False)
            report.finished[sequence.sequence_id] = sequence.complete(Cut(0, FinishReason.ABORT))
            report.refused[sequence.sequence_id] = str(problem)
        self.scheduler.refused.clear()

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
            if hasattr(drafter, "bind"):
                drafter.bind(forward)
            return drafter.device_chain(config) if hasattr(drafter, "device_chain") else None

    config = with_kv_memory(model, config, drafter.needs)
    measure = has_budget and config.max_draft > 0
    executors = build_executors(
        model, config, attention, common, notify, measure=measure, needs=drafter.needs, adapters=adapters, bind=bind
    )  # fmt: skip
    limits = limits_of(drafter)
    limits = limits._replace(depth=min(limits.depth, config.max_draft))
    selection = None if executors.curve is None else DraftSelection(executors.curve, limits, warn)
    return Engine(
        model.config, config, executors, drafter, decode, selection,
        drafters=drafters, grammars=grammars, adapters=adapters,
        models=(model, *getattr(innermost(drafter), "copies", ())),
    )  # fmt: skip


@contextmanager
def _reported(drafter: Drafter) -> Iterator[None]:
    """Convert an exception that a drafter raises during setup to a UserError."""
    try:
        yield
    except Exception as problem:
        name = type(innermost(drafter)).__qualname__
        raise UserError(f"the drafter {name} cannot be used: {type(problem).__name__}: {problem}") from problem
