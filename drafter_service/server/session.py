"""The sequences of one stream: a request is checked as a whole, then applied, or refused without any effect."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import grpc
import numpy as np

from drafter_service.observability.facts import Engine
from drafter_service.observability.report.schema import ClientTotals
from drafter_service.server.namespace import Namespace
from drafter_service.server.requests import (
    MAX_FIELDS,
    FinishedSequence,
    StartedSequence,
    read_draft_counts,
    read_finish,
    read_start,
)
from drafter_service.server.shadow import ShadowDrafter
from drafter_service.settings.tree import Limits
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import WireError, drafts_message, pack, read_batch, unpack_batch
from ssd.budget.padding import NO_PADDING, Padding
from ssd.config import DraftShape
from ssd.drafter import SuffixDrafter
from ssd.types import DraftBatch, Progress, offsets_of

NO_TOKENS = np.empty(0, np.uint32)
UNKNOWN_ENGINE = Engine("", "")


class Drafted(NamedTuple):
    """A batch with drafts."""

    batch: Progress
    part: Progress
    """The sequences of the batch that could have drafts."""
    drafts: DraftBatch


class Session:
    """The sequences of one stream, over the corpus of a namespace. Used by the event loop alone."""

    def __init__(
        self,
        namespace: Namespace,
        limits: Limits,
        engine: Engine = UNKNOWN_ENGINE,
        draft_shape: DraftShape | None = None,
        padding: Padding = NO_PADDING,
    ) -> None:
        """engine: its identity. draft_shape: shape of its drafts; None: as configured. padding: shapes that it pads
        steps to.
        """
        self.namespace = namespace
        self._limits = limits
        self._draft_shape = draft_shape
        self._may_learn = False
        self._use = namespace.engines.connect(engine)
        self._drafter = namespace.new_drafter(draft_shape, namespace.new_curve(padding), self._use.stats)
        self._shadow: ShadowDrafter | None = None
        """Drafter of the sequences whose drafts are withheld; None before the first."""
        self._withheld: set[int] = set()
        """Sequences whose drafts are withheld."""
        self._tokens = 0
        """Number of tokens of all sequences, prompts included."""
        self._pause_steps = 0
        """`DraftBatch.pause_steps` of the next response."""
        self._unrecorded: Drafted | None = None
        """The batch of the last request, until `record`."""
        self._reported: ClientTotals | None = None
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
        (batch, part, drafts), self._unrecorded = self._unrecorded, None
        self._drafter.publish(part)
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
        if self._shadow is not None:
            self.namespace.release(self._shadow.drafter)

    def _new_shadow(self) -> ShadowDrafter:
        """Return the drafter for withheld drafts, which are limited by the same durations of steps as the others."""
        curve = self._drafter.budget.curve
        return ShadowDrafter(self.namespace.new_drafter(self._draft_shape, curve, self.namespace.shadow.stats))

    def _apply(self, request: pb.DraftRequest) -> pb.DraftResponse:
        response = pb.DraftResponse(step=request.step)
        if _has_only_batch(request) and (ready := self._draft_ready(request.batch)) is not None:
            drafts_message(ready, response.drafts)
            return response
        vocab_size = self.namespace.model.vocab_size
        starts = [read_start(message, index, vocab_size) for index, message in enumerate(request.starts)]
        new = {start.sequence_id for start in starts}
        if starts:
            self._check_starts(starts, new)
        finishes = [read_finish(message, index, vocab_size) for index, message in enumerate(request.finishes)]
        if finishes:
            self._check_finishes(finishes, new)
        batch = None
        if request.HasField("batch"):
            _check_count(request.batch.sequence_ids, "batch")
            batch = read_batch(request.batch, vocab_size)
            self._check_batch(batch, new)
        counts = read_draft_counts(request.draft_counts) if request.HasField("draft_counts") else None
        # Nothing below can fail.
        for start in starts:
            self._start(start)
        lost = [finish.sequence_id for finish in finishes if not self._finish(finish)]
        if request.HasField("counters"):
            self._add_counters(request.counters)
        if counts is not None:
            self._use.stats.add(counts)
        if batch is not None:
            drafts, lost_in_batch = self._draft(batch)
        else:
            drafts, lost_in_batch = DraftBatch.empty(0), []
        drafts_message(drafts, response.drafts)
        response.lost_ids = _packed_ids(lost + lost_in_batch)
        return response

    def _draft_ready(self, message: pb.Batch) -> DraftBatch | None:
        """Return drafts for a batch if all its sequences can have drafts, the usual case.

        Raises WireError, and ValueError for a failure of the drafter.
        """
        if message.steps or self._withheld:
            return None
        _check_count(message.sequence_ids, "batch")
        batch = unpack_batch(message, self.namespace.model.vocab_size)
        try:
            drafts = self._draft_part(batch, batch)
        except ValueError:
            # The general path answers a fault of the request. A fault of the drafter ends the stream.
            checked = read_batch(message, self.namespace.model.vocab_size)
            self._check_batch(checked, set())
            if self._drafter.running.ids >= {*checked.sequence_ids.tolist()}:
                raise
            return None
        self._tokens += len(batch.tokens)
        return drafts

    def _draft_part(self, batch: Progress, part: Progress) -> DraftBatch:
        """Return drafts for a part of a batch, whose sequences run. Raises ValueError as `SuffixDrafter.draft`."""
        times, part.step_times = part.step_times, ()  # `record` learns from them.
        drafts = self._drafter.draft_unpublished(part)
        part.step_times = times
        drafts.pause_steps, self._pause_steps = self._pause_steps, 0
        self._unrecorded = Drafted(batch, part, drafts)
        return drafts

    def _check_finishes(self, finishes: list[FinishedSequence], new: set[int]) -> None:
        """Check counts, except those of unknown sequences."""
        if len({finish.sequence_id for finish in finishes}) < len(finishes):
            raise WireError("finishes contains a sequence twice")
        offered = self._drafter.running.offered_to([finish.sequence_id for finish in finishes])
        for index, (finish, limit) in enumerate(zip(finishes, offered.tolist(), strict=True)):
            is_known = limit >= 0 or finish.sequence_id in new or finish.sequence_id in self._withheld
            if is_known and finish.verified > max(0, limit):
                raise WireError(
                    f"finishes[{index}].verified is {finish.verified}; the sequence's last draft had {max(0, limit)} "
                    "tokens"
                )

    def _check_starts(self, starts: list[StartedSequence], new: set[int]) -> None:
        """Check that sequences are new and that there is room for them, once all others are dropped."""
        if len(new) < len(starts) or any(self._has(sequence_id) for sequence_id in new):
            raise WireError("starts contains a sequence that is already running")
        tokens = sum(map(_size, starts))
        if tokens > self._limits.stream_tokens:
            raise WireError(f"starts has {tokens} tokens; a stream may have {self._limits.stream_tokens}")

    def _check_batch(self, batch: Progress, new: set[int]) -> None:
        """Check counts, except those of unknown sequences."""
        offered = self._drafter.running.offered_to(batch.sequence_ids.tolist())
        wrong = (offered >= 0) & (batch.verified > offered)
        if new or self._withheld:
            undrafted = np.array([*new, *self._withheld], np.uint64)
            wrong |= np.isin(batch.sequence_ids, undrafted) & (batch.verified > 0)
        if np.count_nonzero(wrong):
            index = int(wrong.argmax())
            raise WireError(
                f"batch.verified[{index}] is {batch.verified[index]}; the sequence's last draft had "
                f"{max(0, int(offered[index]))} tokens"
            )

    def _start(self, start: StartedSequence) -> None:
        sequence_id = start.sequence_id
        if start.shadow:
            self._shadow = self._shadow or self._new_shadow()
            self._withheld.add(sequence_id)
        self._drafter_of(sequence_id).begin(
            sequence_id,
            start.prompt,
            hints=start.hints,
            committed=start.committed,
            session_id=start.session_id,
            request_id=start.request_id,
            learn=start.learn and self._may_learn,
            rollout=start.rollout,
            seed=start.seed,
        )
        self._tokens += _size(start)
        self._make_room()

    def _drop(self, sequence_id: int) -> None:
        """End a sequence without learning from it."""
        drafter = self._drafter_of(sequence_id)
        self._remove(sequence_id)
        drafter.finish(sequence_id, NO_TOKENS, learn=False)

    def _finish(self, finish: FinishedSequence) -> bool:
        """End a sequence; return whether it existed."""
        if not self._has(finish.sequence_id):
            return False
        drafter = self._drafter_of(finish.sequence_id)
        self._remove(finish.sequence_id)
        learn = finish.learn and self._may_learn
        if isinstance(drafter, ShadowDrafter):
            self.namespace.shadow.observed += 1
            self.namespace.shadow.scored += 1
            drafter.finish(finish.sequence_id, finish.tokens, learn=learn)
        else:
            drafter.finish(finish.sequence_id, finish.tokens, verified=finish.verified, steps=finish.steps, learn=learn)
        return True

    def _draft(self, batch: Progress) -> tuple[DraftBatch, list[int]]:
        """Return drafts, and the sequences that are unknown; the drafts that are withheld are empty."""
        ids = batch.sequence_ids.tolist()
        if self._withheld.isdisjoint(ids):
            return self._draft_openly(batch, batch, ids)
        withheld = [index for index, sequence_id in enumerate(ids) if sequence_id in self._withheld]
        others = [index for index, sequence_id in enumerate(ids) if sequence_id not in self._withheld]
        self._withhold(_part(batch, withheld))
        drafts, lost = self._draft_openly(batch, _part(batch, others), [ids[index] for index in others])
        return drafts.scatter(np.array(others, np.int64), len(ids)), lost

    def _withhold(self, batch: Progress) -> None:
        """Score the withheld drafts against the tokens of a batch, and make the next ones."""
        assert self._shadow is not None
        self._tokens += len(batch.tokens)
        self._shadow.advance(batch)

    def _draft_openly(self, batch: Progress, part: Progress, ids: list[int]) -> tuple[DraftBatch, list[int]]:
        """Return drafts for the sequences of a part of a batch that are known, and the unknown ones.

        ids: the sequences of the part.
        """
        running = self._drafter.running.ids
        known = [index for index, sequence_id in enumerate(ids) if sequence_id in running]
        lost = [sequence_id for sequence_id in ids if sequence_id not in running]
        part = _part(part, known)
        drafts = self._draft_part(batch, part)
        self._tokens += len(part.tokens)
        return drafts.scatter(np.array(known, np.int64), len(ids)), lost

    def _drafter_of(self, sequence_id: int) -> SuffixDrafter | ShadowDrafter:
        """Return the drafter of a sequence."""
        if sequence_id not in self._withheld:
            return self._drafter
        assert self._shadow is not None
        return self._shadow

    def _has(self, sequence_id: int) -> bool:
        """Return whether a sequence runs."""
        return sequence_id in self._drafter.running.ids or sequence_id in self._withheld

    def _remove(self, sequence_id: int) -> None:
        """Stop counting a sequence, before its drafter ends it."""
        drafter = self._drafter_of(sequence_id)
        sizes = drafter if isinstance(drafter, ShadowDrafter) else drafter.running
        self._tokens -= sizes.size_of(sequence_id)
        self._withheld.discard(sequence_id)

    def _make_room(self) -> None:
        """Drop the least recently used sequences until the others are within the limits."""
        if self._is_within_limits:
            return
        drafters = [self._drafter, *([] if self._shadow is None else [self._shadow.drafter])]
        ids, times = zip(*(each.running.last_uses() for each in drafters), strict=True)
        running = [*chain.from_iterable(ids)]
        for index in np.concatenate(times).argsort(kind="stable").tolist():
            self._drop(running[index])
            if self._is_within_limits:
                return

    @property
    def _is_within_limits(self) -> bool:
        sequences = len(self._drafter.running) + len(self._withheld)
        return sequences <= self._limits.sequences and self._tokens <= self._limits.stream_tokens

    def _add_counters(self, counters: pb.ClientCounters) -> None:
        """Add the increase since the client's last message."""
        totals = ClientTotals(**{name: getattr(counters, name) for name in vars(self.namespace.clients)})
        reported = self._reported
        if reported is None:
            # A reconnected client has sent most of these totals before, on another stream.
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


def error_response(step: int, status: grpc.StatusCode, message: str) -> pb.DraftResponse:
    """Return an error as the response to a request."""
    return pb.DraftResponse(step=step, error=pb.Error(code=status.value[0], message=message))


def _has_only_batch(request: pb.DraftRequest) -> bool:
    others = request.starts or request.finishes or request.HasField("counters") or request.HasField("draft_counts")
    return request.HasField("batch") and not others


def _check_count(sequence_ids: bytes, owner: str) -> None:
    """Raise WireError for a batch that is too large."""
    count = len(sequence_ids) // 8
    if count > MAX_FIELDS:
        raise WireError(f"{owner}.sequence_ids has {count} elements; the maximum is {MAX_FIELDS}")


def _size(start: StartedSequence) -> int:
    """Return the number of tokens that a sequence begins with."""
    return len(start.hints) + len(start.prompt) + len(start.committed)


def _packed_ids(ids: list[int]) -> bytes:
    return pack(np.array(ids, np.uint64), "u8") if ids else b""


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
