"""The engine's loop: plan a step, propose drafts, launch it, commit its results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from engine.config import EngineConfig
from engine.drafters.tokens import adapt, innermost
from engine.executor.base import Executor, InFlightStep
from engine.executor.build import build_executors
from engine.executor.shapes import Captured
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.detokenize import Decode
from engine.sampling.stopping import Cut, Stopping
from engine.scheduling.pages import PagePool
from engine.scheduling.plan import SequenceResult
from engine.scheduling.request import Completion, FinishReason, Request, SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.times import StageTimes, Stopwatch
from engine.speculation.speculation import Speculation
from engine.speculation.token_budget import TokenBudget
from ssd.errors import UserError

if TYPE_CHECKING:
    from engine.drafters.registry import AnyDrafter

COMMON_SAMPLING = SamplingParams(temperature=1.0)
"""Settings that most requests are assumed to have."""


@dataclass
class StepReport:
    """What one step did."""

    results: list[SequenceResult] = field(default_factory=list)
    """Of the sequences that produced tokens."""
    finished: dict[int, Completion] = field(default_factory=dict)
    """Completions by the ids that `Engine.add` returned."""
    times: StageTimes = field(default_factory=StageTimes)
    """Duration of its stages."""
    is_ahead: bool = False
    """Whether the next step was launched before the results of this one were read."""

    @property
    def tokens(self) -> dict[int, np.ndarray]:
        """Committed tokens by the ids that `Engine.add` returned."""
        return {result.sequence_id: result.tokens for result in self.results}

    @property
    def committed(self) -> int:
        """Number of committed tokens."""
        return sum(len(result.tokens) for result in self.results)


class Engine:
    """Runs requests to completion, many at a time."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        executor: Executor,
        pages: PagePool,
        drafter: AnyDrafter,
        decode: Decode | None = None,
        budget: TokenBudget | None = None,
    ) -> None:
        """`decode` reads the output of requests that have stop strings; without it those are refused. Without a
        `budget` all draft tokens are verified.
        """
        self.model = model
        self.scheduler = Scheduler(config, pages)
        self._config = config
        self._executor = executor
        self._speculation = Speculation(drafter, config, model.vocab_size, budget)
        self._decode = decode
        self._budget = budget
        self._in_flight: deque[InFlightStep] = deque()
        """Launched steps, the oldest first."""
        self._next_id = 0

    @property
    def max_draft(self) -> int:
        """Largest number of draft tokens of a sequence in a step."""
        return self._config.max_draft

    @property
    def drafter(self) -> object:
        """The drafter in use, as it was given to the engine."""
        return innermost(self._speculation.drafter)

    @property
    def captured(self) -> Captured:
        """The CUDA graphs that were captured when the engine was built."""
        return Captured(0, 0.0)

    def add(self, request: Request) -> int:
        """Queue a request and return the id of its completion. Raises UserError for a request that cannot run."""
        return self._queue(request).sequence_id

    def check(self, request: Request) -> int:
        """Return the largest length, prompt and output, that a request may reach.

        Raises UserError for a request that cannot run.
        """
        request.check(self.model)
        if request.sampling.stop and self._decode is None:
            raise UserError("stop needs the model's tokenizer, which this engine was not given; use stop_token_ids")
        longest = min(len(request.prompt) + request.sampling.max_tokens, self.model.max_positions)
        pages = self.scheduler.pages
        if pages.pages_for(longest) > pages.count:
            raise UserError(
                f"prompt and output of up to {longest} tokens do not fit into the KV cache of "
                f"{pages.count * pages.page_size} tokens; ask for fewer tokens or give it more memory (--kv-memory)"
            )
        return longest

    def step(self) -> StepReport:
        """Advance the running sequences by one token or more, or by a part of a prompt."""
        watch = Stopwatch()
        if not self._in_flight and not self._launch(watch):
            return StepReport(times=watch.times())
        return self._commit(self._in_flight.popleft(), watch)

    def cancel(self, sequence_id: int) -> Completion | None:
        """End a request between two steps; its completion has what it has produced, and the reason ABORT.

        Returns None if there is no such request, or if it has ended.
        """
        sequence = self.scheduler.find(sequence_id)
        if sequence is None:
            return None
        return self._finish(sequence, Cut(0, FinishReason.ABORT))

    def generate(
        self, requests: Iterable[Request], observe: Callable[[StepReport], None] = lambda _: None
    ) -> list[Completion]:
        """Run requests and return their completions in the same order; `observe` gets the report of each step.

        It may cancel requests; their completions have the reason ABORT.

        Raises UserError if one of the requests cannot run, before any of them does.
        """
        asked = list(requests)
        for request in asked:
            self.check(request)
        sequences = [self._queue(request) for request in asked]
        completions: dict[int, Completion] = {}
        while self.scheduler.has_work:
            report = self.step()
            completions.update(report.finished)
            observe(report)
        cancelled = Cut(0, FinishReason.ABORT)
        return [completions.get(sequence.sequence_id) or sequence.complete(cancelled) for sequence in sequences]

    def close(self) -> None:
        """Release the drafter."""
        self._speculation.close()

    def _queue(self, request: Request) -> Sequence:
        longest = self.check(request)
        if request.sampling.verification is None and self._config.verification != "exact":
            request = replace(request, sampling=replace(request.sampling, verification=self._config.verification))
        stopping = Stopping(request, self.model.eos_token_ids, self._decode)
        sequence = Sequence(self._next_id, request, longest, stopping)
        self.scheduler.add(sequence)
        self._next_id += 1
        return sequence

    def _launch(self, watch: Stopwatch) -> bool:
        """Plan a step and launch it; return whether there is anything to run."""
        plan = self.scheduler.plan()
        watch.lap("schedule")
        if not plan.entries:
            return False
        self._speculation.propose(plan)
        watch.lap("draft")
        step = self._executor.launch(plan)
        self._in_flight.append(step)
        watch.lap("forward")
        for entry in plan.entries:
            # The last token counts as computed when the token after it is known.
            ahead = entry.scheduled - entry.produces
            if ahead:
                entry.sequence.computed += ahead
                self.scheduler.register_pages(entry.sequence)
        return True

    def _commit(self, step: InFlightStep, watch: Stopwatch) -> StepReport:
        """Wait for a step, append what it produced, and end the sequences whose output ends."""
        result = step.result()
        watch.lap("verify")
        report = StepReport()
        ended: list[tuple[Sequence, Cut]] = []
        for each in result.results:
            if each.plan.produces:
                cut = self._append(each)
                report.results.append(each)
                if cut.reason is not None:
                    ended.append((each.plan.sequence, cut))
        watch.lap("commit")
        self._speculation.observe(result)
        watch.lap("draft")
        for sequence, cut in ended:
            report.finished[sequence.sequence_id] = self._finish(sequence, cut)
        watch.lap("commit")
        report.times = watch.times()
        if self._budget is not None:
            accepted = sum(each.accepted for each in report.results)
            self._budget.record(step.plan, step.plan.tokens, accepted, report.times.forward + report.times.verify)
        return report

    def _append(self, result: SequenceResult) -> Cut:
        """Commit what a step produced for a sequence, up to where its output ends."""
        sequence = result.plan.sequence
        cut = sequence.stopping.cut(result.tokens, sequence.room)
        if cut.length < len(result.tokens):
            result.tokens = result.tokens[: cut.length]
            result.kept = result.kept[: cut.length]
            if result.logprobs is not None:
                result.logprobs = result.logprobs.at(np.arange(cut.length))
        sequence.commit(result)
        self.scheduler.register_pages(sequence)
        return cut

    def _finish(self, sequence: Sequence, cut: Cut) -> Completion:
        learn = sequence.request.learn and cut.reason is not FinishReason.ABORT
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
    common: SamplingParams = COMMON_SAMPLING,  # noqa: ARG001
    notify: Callable[[str], None] = lambda _: None,  # noqa: ARG001
) -> Engine:
    """Return an engine for a loaded model. Engines may share a model; each has its own KV cache.

    `decode` is the tokenizer's, for requests with stop strings. `has_budget`: measure what a step costs, for a few
    seconds, and verify only draft tokens that pay; otherwise all of them. `attention`: as in `choose_backend`.
    `common`: settings that most requests are expected to have. `notify` is called with a line before and after long
    preparations. Raises UserError for an attention or a KV cache that is not available.
    """
    drafter = adapt(drafter)
    measure = has_budget and config.max_draft > 0
    executors = build_executors(model, config, attention, measure=measure, needs=drafter.needs)
    if hasattr(drafter, "bind"):
        drafter.bind(executors.eager.runner.draft_forward(config.page_size))
    budget = None if executors.cost is None else TokenBudget(executors.cost)
    return Engine(model.config, config, executors.eager, executors.pages, drafter, decode, budget)
