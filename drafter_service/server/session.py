"""The sequences of one stream: a request is checked as a whole, then applied, or refused without any effect."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import grpc
import numpy as np

from drafter_service.observability.facts import Engine
from drafter_service.observability.report.schema import ClientTotals
from drafter_service.server.namespace import Namespace
from drafter_service.server.requests import StartedSequence, read_draft_counts, read_finish, read_start
from drafter_service.server.shadow import ShadowDrafter
from drafter_service.settings.tree import Limits
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import MAX_COUNT, WireError, check_batch, drafts_message, pack, read_batch
from ssd.budget.padding import NO_PADDING, Padding
from ssd.config import DraftShape
from ssd.corpus.rollout import NO_TAG
from ssd.stats import VersionTotals
from ssd.types import DraftBatch, Progress, offsets_of

NO_TOKENS = np.empty(0, np.uint32)
NO_DRAFTS = DraftBatch.empty(0)
UNKNOWN_ENGINE = Engine("", "")


class Session:
    """The sequences of one stream, over the corpus of a namespace. Used by the event loop alone."""

    def __init__(
        self,
        namespace: Namespace,
        limits: Limits,
        engine: Engine = UNKNOWN_ENGINE,
        draft_shape: DraftShape | None = None,
        padding: Padding = NO_PADDING,
        counted: pb.ClientCounters | None = None,
    ) -> None:
        """engine: its identity. draft_shape: shape of its drafts; None: as configured. padding: shapes that it pads
        steps to. counted: see `Hello.counted`; None: not known.
        """
        self.namespace = namespace
        self._limits = limits
        self._draft_shape, self._padding = draft_shape, padding
        self._may_learn = False
        self._use = namespace.engines.connect(engine)
        self._drafter = namespace.new_drafter(draft_shape, padding, self._use.stats)
        self._shadow: ShadowDrafter | None = None
        """The same drafter if the drafts of the running sequences are withheld."""
        self._tokens = 0
        """Number of tokens of all sequences, prompts included."""
        self._pause_steps = 0
        """`DraftBatch.pause_steps` of the next response."""
        self._unrecorded: tuple[Progress, DraftBatch] | None = None
        """The known sequences of the last request's batch and their drafts, until `record`."""
        self._reported = None if counted is None else _client_totals(counted)
        """Totals of the client's last message."""
        self._uncounted_steps = 0
        """Steps without a request that were counted before the message that says so; 0 or negative."""

    @property
    def max_draft(self) -> int:
        """Maximum number of tokens in a draft."""
        return self.namespace.config.max_draft

    def answer(self, request: pb.DraftRequest, *, may_learn: bool) -> pb.DraftResponse:
        """Return the response to a request; an error, and no effect, for an invalid one.

        Call `record` once it is sent. `may_learn`: whether the client has the right to learn.
        """
        self.record()
        self._may_learn = may_learn
        try:
            began = time.perf_counter()
            response = self._apply(request)
            if request.HasField("batch"):
                self.namespace.draft_latency.record(time.perf_counter() - began)
            return response
        except WireError as problem:
            return error_response(request.step, grpc.StatusCode.INVALID_ARGUMENT, str(problem))

    def record(self) -> None:
        """Do what the last request needs once its response is sent: offer its tokens to others, count, and learn."""
        if self._unrecorded is None:
            return
        (batch, drafts), self._unrecorded = self._unrecorded, None
        self._drafter.publish()
        self._drafter.running.record_use()
        self._make_room()
        self._use.engine_steps += 1
        self._use.offered += len(drafts.tokens)
        if batch.step_times:
            self._pause_steps = self._drafter.budget.learn(batch)

    def close(self) -> None:
        """Drop all sequences without learning from them."""
        self.namespace.engines.disconnect(self._use)
        self.namespace.release(self._drafter)

    def _withhold(self, withheld: bool) -> None:
        """Withhold drafts from now on, or no more, while no sequence runs."""
        namespace, given, self._shadow = self.namespace, (self._draft_shape, self._padding), None
        namespace.release(self._drafter)
        if withheld:
            self._shadow = namespace.new_shadow_drafter(*given)
        self._drafter = self._shadow or namespace.new_drafter(*given, self._use.stats)

    def _apply(self, request: pb.DraftRequest) -> pb.DraftResponse:
        response = pb.DraftResponse(step=request.step)
        vocab_size = self.namespace.model.vocab_size
        starts: list[StartedSequence] = []
        finished: list[np.ndarray] = []
        batch = read_batch(request.batch, vocab_size) if request.HasField("batch") else None
        if request.starts or request.finishes:
            starts += [read_start(message, index, vocab_size) for index, message in enumerate(request.starts)]
            finished += [read_finish(message, index, vocab_size) for index, message in enumerate(request.finishes)]
            new = {start.sequence_id for start in request.starts}
            self._check_starts(starts, new)
            self._check_finishes(request.finishes, new)
            if batch is not None:
                self._check_batch(batch, new)
        counts = read_draft_counts(request.draft_counts) if request.HasField("draft_counts") else None
        # Nothing can fail from here on, unless there is only a batch, which has no effect if it fails.
        ends = {finish.sequence_id: (finish, tokens) for finish, tokens in zip(request.finishes, finished, strict=True)}
        for start in starts:
            if batch is None and start.is_alone and start.message.sequence_id in ends:
                self._learn(start, *ends.pop(start.message.sequence_id))
            else:
                self._start(start)
        ended = [sequence_id for sequence_id, end in ends.items() if not self._finish(*end)]
        drafts, lost = (NO_DRAFTS, []) if batch is None else self._draft(batch)
        drafts_message(drafts, response.drafts)
        if request.HasField("counters"):
            self._add_counters(request.counters)
        if counts is not None:
            self._use.stats.add(counts)
        if ended or lost:
            response.lost_ids = pack(np.array(ended + lost, np.uint64), "u8")
        return response

    def _draft(self, batch: Progress) -> tuple[DraftBatch, list[int]]:
        """Return drafts, and the sequences that are unknown.

        Raises WireError, without any effect, for an invalid batch.
        """
        try:
            return self._draft_known(batch), []  # The drafter itself checks the batch.
        except ValueError:
            self._check_batch(batch)
            ids, running = batch.sequence_ids.tolist(), self._drafter.running.ids
            if running >= {*ids}:
                raise  # A fault of the drafter ends the stream.
        drafted = [index for index, each in enumerate(ids) if each in running]
        drafts = self._draft_known(_part(batch, drafted))
        lost = [each for each in ids if each not in running]
        return drafts.scatter(np.array(drafted, np.int64), len(ids)), lost

    def _draft_known(self, batch: Progress) -> DraftBatch:
        """Return drafts for a batch of running sequences. Raises ValueError as `SuffixDrafter.draft`."""
        times, batch.step_times = batch.step_times, ()  # `record` learns from them.
        try:
            drafts = self._drafter.draft_unpublished(batch)
        finally:
            batch.step_times = times
        drafts.pause_steps, self._pause_steps = self._pause_steps, 0
        self._unrecorded = batch, drafts
        self._tokens += len(batch.tokens)
        return drafts

    def _check_finishes(self, finishes: Sequence[pb.Finish], new: set[int]) -> None:
        """Check counts, except those of unknown sequences."""
        if len({finish.sequence_id for finish in finishes}) < len(finishes):
            raise WireError("finishes contains a sequence twice")
        offered = self._offered_to([finish.sequence_id for finish in finishes])
        for index, (finish, limit) in enumerate(zip(finishes, offered, strict=True)):
            is_known = limit >= 0 or finish.sequence_id in new
            if is_known and finish.verified > max(0, limit):
                raise WireError(
                    f"finishes[{index}].verified is {finish.verified}; the sequence's last draft had {max(0, limit)} "
                    "tokens"
                )

    def _check_starts(self, starts: list[StartedSequence], new: set[int]) -> None:
        """Check that sequences are new and that there is room for them, once all others are dropped."""
        running = self._drafter.running
        if len(new) < len(starts) or running.ids & new:
            raise WireError("starts contains a sequence that is already running")
        withheld = {start.message.shadow for start in starts} | ({self._shadow is not None} if len(running) else set())
        if len(withheld) > 1:
            raise WireError(
                "starts has sequences with and without shadow; use one stream with shadow, and another one without"
            )
        tokens = sum(start.size for start in starts)
        if tokens > self._limits.stream_tokens:
            raise WireError(f"starts has {tokens} tokens; a stream may have {self._limits.stream_tokens}")

    def _check_batch(self, batch: Progress, new: Collection[int] = ()) -> None:
        """Raise WireError for an invalid batch; counts of unknown sequences are not checked."""
        ids = batch.sequence_ids.tolist()
        offered = dict(zip(ids, self._offered_to(ids), strict=True))
        for sequence_id, limit in offered.items():
            if limit < 0:
                offered[sequence_id] = 0 if sequence_id in new else MAX_COUNT
        check_batch(batch, offered)

    def _offered_to(self, ids: list[int]) -> list[int]:
        """Return the number of tokens in the last draft that each sequence got; -1 for an unknown one."""
        offered: list[int] = self._drafter.running.offered_to(ids).tolist()
        return offered if self._shadow is None else [min(0, each) for each in offered]

    def _start(self, start: StartedSequence) -> None:
        message = start.message
        if message.shadow != (self._shadow is not None):
            self._withhold(message.shadow)
        self._drafter.start(
            message.sequence_id,
            **start.texts,
            session_id=message.session_id or None,
            request_id=message.request_id or None,
            learn=self._may_be_learned(message),
            rollout=start.rollout,
            seed=message.seed if message.HasField("seed") else None,
        )
        self._tokens += start.size
        self._make_room()

    def _may_be_learned(self, message: pb.Start) -> bool:
        """Return whether what a sequence produces may be learned."""
        name = message.request_id
        was_forgotten = bool(name) and self.namespace.was_forgotten(name, message.age_s)
        return message.learn and self._may_learn and not was_forgotten

    def _learn(self, start: StartedSequence, finish: pb.Finish, tokens: np.ndarray) -> None:
        """Count and learn a sequence that needs no drafts, as starting and ending it would."""
        prompt, committed = start.texts["prompt"], start.texts["committed"]
        steps = max(1, finish.steps) if len(tokens) else 0
        self._use.stats.record_path(len(tokens), 0, 0, steps)
        if start.rollout is not None:
            totals = VersionTotals(1, steps, len(tokens), ended_at=time.monotonic())
            self._use.stats.record_version(start.rollout.version, totals)
        if finish.learn and self._may_be_learned(start.message):
            first = max(0, len(prompt) - self.namespace.config.learned_prompt_tokens)
            tag = NO_TAG if start.rollout is None else start.rollout.tag
            text = np.concatenate([prompt[first:], committed, tokens])
            self.namespace.learn(text, start.message.request_id or None, tag)

    def _finish(self, finish: pb.Finish, tokens: np.ndarray) -> bool:
        """End a sequence; return whether it existed."""
        if finish.sequence_id not in self._drafter.running.ids:
            return False
        learn = finish.learn and self._may_learn
        self._end(finish.sequence_id, tokens, verified=finish.verified, steps=max(1, finish.steps), learn=learn)
        return True

    def _end(self, sequence_id: int, tokens: np.ndarray, **outcome: Any) -> None:
        """End a sequence; outcome: as in `CorpusDrafter.finish`."""
        waiting = 0 if self._shadow is None else self._shadow.waiting_of(sequence_id)
        self._tokens -= self._drafter.running.size_of(sequence_id) + waiting
        self._drafter.finish(sequence_id, tokens, **outcome)

    def _make_room(self) -> None:
        """Drop the least recently used sequences, without learning, until the others are within the limits."""
        if self._is_within_limits:
            return
        running, times = self._drafter.running.last_uses()
        for index in times.argsort(kind="stable").tolist():
            self._end(running[index], NO_TOKENS, learn=False)
            if self._is_within_limits:
                return

    @property
    def _is_within_limits(self) -> bool:
        sequences = len(self._drafter.running)
        return sequences <= self._limits.sequences and self._tokens <= self._limits.stream_tokens

    def _add_counters(self, counters: pb.ClientCounters) -> None:
        """Add the increase since the client's last message."""
        totals, reported = _client_totals(counters), self._reported
        if reported is None:
            # A reconnected client of an earlier version has sent most of these totals before, on another stream.
            reconnects = max(0, totals.reconnects - 1)
            reported = totals.model_copy(update={"reconnects": reconnects}) if totals.reconnects else ClientTotals()
        for name, total in vars(totals).items():
            grown = max(0, total - getattr(reported, name))
            setattr(self.namespace.clients, name, getattr(self.namespace.clients, name) + grown)
        self._reported = totals
        # Of the late steps, those whose responses arrived later were counted with their requests.
        late, dropped = totals.timeouts - reported.timeouts, totals.dropped - reported.dropped
        self._use.late_steps += max(0, late)
        steps = self._uncounted_steps + late - dropped
        self._use.engine_steps += max(0, steps)
        self._uncounted_steps = min(0, steps)


def _client_totals(counters: pb.ClientCounters) -> ClientTotals:
    return ClientTotals(**{name: getattr(counters, name) for name in ClientTotals.model_fields})


def error_response(step: int, status: grpc.StatusCode, message: str) -> pb.DraftResponse:
    """Return an error as the response to a request."""
    return pb.DraftResponse(step=step, error=pb.Error(code=status.value[0], message=message))


def _part(batch: Progress, indices: list[int]) -> Progress:
    """Return some sequences of a batch; the others get no drafts here."""
    at = np.array(indices, np.int64)
    runs = [batch.tokens[batch.offsets[index] : batch.offsets[index + 1]] for index in indices]
    others = len(batch.sequence_ids) - len(indices)
    return replace(
        batch,
        sequence_ids=batch.sequence_ids[at],
        tokens=np.concatenate([NO_TOKENS, *runs]),
        offsets=offsets_of(np.array([len(run) for run in runs], np.uint32)),
        verified=batch.verified[at],
        max_draft=batch.max_draft[at],
        steps=None if batch.steps is None else batch.steps[at],
        other_sequences=batch.other_sequences + others,
    )
