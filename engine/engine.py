"""The step: schedule, draft, forward, verify, commit; its caller observes what it reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from engine.config import EngineConfig
from engine.executor.batch import Batch, build_batch
from engine.executor.eager import Runner
from engine.models.config import ModelConfig
from engine.models.detokenize import Decode
from engine.sampling.logprobs import Logprobs
from engine.sampling.sampler import Chosen, choose
from engine.sampling.stopping import Cut, Stopping
from engine.scheduling.pages import PagePool
from engine.scheduling.request import Completion, FinishReason, Request
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.times import StageTimes, Stopwatch
from engine.speculation.drafting import Drafting
from engine.speculation.overlap import OverlappedDrafting
from engine.speculation.token_budget import Budget
from engine.speculation.verify import accepted_length, accepted_path
from ssd.errors import UserError
from ssd.types import Drafter

ROWS = np.arange(1)
"""Rows that a sequence without a draft may produce from."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a step produced for one sequence."""

    sequence_id: int
    """As `Engine.add` gave it."""
    tokens: np.ndarray
    """uint32 [n]."""
    drafted: int
    """Draft tokens that were verified."""
    depth: int
    """The most of them that could be kept: all of a path; of a tree, its longest path."""
    accepted: int
    """How many of those were kept: the first so many of `tokens`."""
    logprobs: Logprobs | None
    """Of `tokens`, if asked for."""
    sources: np.ndarray
    """uint8 [drafted]: where each draft token was found, see `ssd.types.Source`."""
    kept: np.ndarray
    """int64 [accepted]: which of them were kept."""


@dataclass
class StepReport:
    """What one step did."""

    outcomes: list[Outcome] = field(default_factory=list)
    """Of the sequences that produced something."""
    finished: dict[int, Completion] = field(default_factory=dict)
    """By the ids that `Engine.add` gave."""
    times: StageTimes = field(default_factory=StageTimes)
    """How long it took."""
    has_next: bool = False
    """Whether the next step was begun before this one was known, as the pipelined loop may do."""

    @property
    def tokens(self) -> dict[int, np.ndarray]:
        """What was produced, by the same ids."""
        return {outcome.sequence_id: outcome.tokens for outcome in self.outcomes}

    @property
    def committed(self) -> int:
        """Tokens produced."""
        return sum(len(outcome.tokens) for outcome in self.outcomes)


class Engine:
    """Runs requests to completion, many at a time."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        runner: Runner,
        pages: PagePool,
        drafter: Drafter,
        decode: Decode | None = None,
        budget: Budget | None = None,
    ) -> None:
        """`decode` reads the output of requests that have stop strings; without it those are refused. Without a
        `budget` everything is verified that was drafted.
        """
        self.model = model
        self.scheduler = Scheduler(config, pages)
        self._config = config
        self._runner = runner
        drafting = OverlappedDrafting if config.loop == "overlapped" else Drafting
        self._drafting = drafting(drafter, config, model.vocab_size, budget)
        self._decode = decode
        self._budget = budget
        self._next_id = 0

    @property
    def max_draft(self) -> int:
        """Most draft tokens of a sequence in a step."""
        return self._config.max_draft

    @property
    def drafter(self) -> Drafter:
        """Whom drafts come from."""
        return self._drafting.drafter

    def add(self, request: Request) -> int:
        """Queue a request; returns the id that its completion comes with. Raises UserError for one that cannot run."""
        return self._queue(request).sequence_id

    def check(self, request: Request) -> int:
        """The length that a request may reach, prompt and output. Raises UserError for one that cannot run."""
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
        """Advance the running sequences by a token or more, or by a part of a prompt, within a step's tokens."""
        watch = Stopwatch()
        admitted = self.scheduler.admit()
        sequences = self.scheduler.schedule()
        watch.lap("schedule")
        for sequence in admitted:
            self._drafting.introduce(sequence)
        if not sequences:
            return StepReport()
        asking = self._drafting.draft(sequences)
        watch.lap("draft")
        batch = build_batch(sequences, self.scheduler.pages.page_size)
        watch.lap("schedule")
        logits = self._runner.forward(batch)
        watch.lap("forward")
        chosen = choose(batch, logits, sequences)
        watch.lap("verify")
        report = self._commit(batch, chosen, sequences)
        watch.lap("commit")
        self._drafting.look_back(sequences)
        watch.lap("draft")
        report.times = watch.times()
        if self._budget is not None:
            accepted = sum(outcome.accepted for outcome in report.outcomes)
            seconds = report.times.forward + report.times.verify
            self._budget.note(len(batch.tokens), len(sequences), accepted, seconds, asking)
        return report

    def cancel(self, sequence_id: int) -> Completion | None:
        """End a request between two steps, wherever it is; its completion has what it has produced, and says ABORT.

        None if there is no such request, or no more: it may have ended while its caller made up its mind.
        """
        sequence = self.scheduler.find(sequence_id)
        if sequence is None:
            return None
        return self._finish(sequence, Cut(0, FinishReason.ABORT))

    def generate(
        self, requests: Iterable[Request], observe: Callable[[StepReport], None] = lambda _: None
    ) -> list[Completion]:
        """Run requests and return their completions in the same order; `observe` sees every step.

        It may cancel requests; their completions say ABORT.

        Raises UserError if one of them cannot run, before any does.
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
        self._drafting.close()

    def _queue(self, request: Request) -> Sequence:
        longest = self.check(request)
        stopping = Stopping(request, self.model.eos_token_ids, self._decode)
        sequence = Sequence(self._next_id, request, longest, stopping)
        self.scheduler.add(sequence)
        self._next_id += 1
        return sequence

    def _commit(self, batch: Batch, chosen: Chosen, sequences: SequenceOf[Sequence]) -> StepReport:
        """Verify the drafts, append what was produced, and let go of what has ended."""
        report = StepReport()
        kept = _kept_rows(batch, chosen, sequences)
        self._compact(batch, kept)
        for index, (sequence, rows) in enumerate(zip(sequences, kept, strict=True)):
            if len(rows) == 0:
                sequence.computed += sequence.scheduled
                self.scheduler.keep(sequence)
                continue
            produced = chosen.tokens[batch.logit_offsets[index] + rows]
            self._append(report, sequence, produced, rows, chosen.logprobs.get(index))
        return report

    def _append(
        self, report: StepReport, sequence: Sequence, produced: np.ndarray, rows: np.ndarray, logprobs: Logprobs | None
    ) -> None:
        """Commit what was produced, from `rows`, up to where the output ends; `logprobs` has those of all rows."""
        cut = sequence.stopping.cut(produced, sequence.room)
        tokens = produced[: cut.length]
        if logprobs is not None:
            logprobs = logprobs.at(rows[: cut.length])
            sequence.logprobs.append(logprobs)
        accepted = rows[1 : 1 + cut.length] - 1
        sequence.commit(tokens, len(accepted))
        self.scheduler.keep(sequence)
        report.outcomes.append(_outcome(sequence, tokens, accepted, logprobs))
        if cut.reason is not None:
            report.finished[sequence.sequence_id] = self._finish(sequence, cut)

    def _compact(self, batch: Batch, kept: SequenceOf[np.ndarray]) -> None:
        """Bring the keys and values of accepted paths together, right behind the committed tokens."""
        moves = []
        for start, span, rows in zip(batch.logit_offsets.tolist(), batch.spans, kept, strict=False):
            if span.tree is not None and len(rows):
                from_rows, to_rows = batch.logit_rows[start + rows], batch.logit_rows[start : start + len(rows)]
                moved = from_rows != to_rows
                moves.append((batch.slots[from_rows[moved]], batch.slots[to_rows[moved]]))
        if moves:
            sources, targets = (np.concatenate(slots) for slots in zip(*moves, strict=True))
            if len(sources):
                self._runner.move(sources, targets)

    def _finish(self, sequence: Sequence, cut: Cut) -> Completion:
        self._drafting.end(sequence, learn=sequence.request.learn and cut.reason is not FinishReason.ABORT)
        self.scheduler.remove(sequence)
        return sequence.complete(cut)


def _kept_rows(batch: Batch, chosen: Chosen, sequences: SequenceOf[Sequence]) -> list[np.ndarray]:
    """For each sequence the rows, int64, whose tokens it produces: behind its last token and accepted draft tokens."""
    kept = []
    bounds = batch.logit_offsets.tolist()
    for index, sequence in enumerate(sequences):
        first, end = bounds[index], bounds[index + 1]
        if end - first <= 1:
            kept.append(ROWS[: end - first])
        elif sequence.tree is None:
            kept.append(np.arange(accepted_length(sequence.draft, chosen.tokens[first:end]) + 1))
        else:
            path = accepted_path(sequence.draft, sequence.tree.parents, chosen.tokens[first:end])
            kept.append(np.concatenate(([0], 1 + path)))
    return kept


def _outcome(sequence: Sequence, tokens: np.ndarray, kept: np.ndarray, logprobs: Logprobs | None) -> Outcome:
    drafted = len(sequence.draft)
    depth = drafted if sequence.tree is None else int(sequence.tree.depths.max())
    sources = sequence.draft_sources[:drafted]
    return Outcome(sequence.sequence_id, tokens, drafted, depth, len(kept), logprobs, sources, kept)
