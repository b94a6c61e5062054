"""One engine's sequences: checks a whole request, then applies it, or refuses it without any effect."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

import grpc
import numpy as np

from drafter_service.observability.facts import ClientTotals
from drafter_service.observability.passages import Passages
from drafter_service.server.namespace import Namespace
from drafter_service.settings.tree import Limits
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.messages import MOST_FIELDS, Begin, End, read_begin, read_end, read_steps
from drafter_service.transport.wire import WireError, drafts_message, pack, read_batch
from ssd.base import Opening
from ssd.stats import STEPS
from ssd.types import DraftBatch, Progress, offsets_of

LONG_PROMPT = 8192
"""Tokens from which a prompt is indexed beside the event loop: about 2 ms."""

NO_TOKENS = np.empty(0, np.uint32)


@dataclass(frozen=True, eq=False)
class Indexing:
    """A sequence whose long prompt is being indexed."""

    task: asyncio.Task[None]
    opening: Opening
    committed: list[np.ndarray] = field(default_factory=list)
    """What it produced meanwhile."""


class Session:
    """The sequences of one client, over the corpus of a namespace. The event loop alone uses it."""

    def __init__(self, namespace: Namespace, limits: Limits) -> None:
        self.namespace = namespace
        self._limits = limits
        self._may_learn = False
        self._drafter = namespace.new_drafter()
        self._indexing: dict[int, Indexing] = {}
        self._used: dict[int, int] = {}
        """The sequences, the one that was silent for longest first, each with how many tokens it has."""
        self._tokens = 0
        """Their sum."""
        self._reported: ClientTotals | None = None
        """The totals that the client last said."""

    @property
    def max_draft(self) -> int:
        """The most tokens that a draft ever has."""
        return self.namespace.config.max_draft

    def sizes(self) -> dict[int, int]:
        """The sequences that run, each with how many tokens it has, prompt included."""
        return dict(self._used)

    def answer(self, request: pb.DraftRequest, *, may_learn: bool) -> pb.DraftResponse:
        """The response to a request; an error, and no effect, for one that cannot be.

        `may_learn`: whether the client has the right to have anything learned.
        """
        self._may_learn = may_learn
        try:
            began = time.perf_counter()
            response = self._apply(request)
            if request.HasField("batch"):
                self.namespace.draft_latency.note(time.perf_counter() - began)
            return response
        except WireError as problem:
            return refusal(request.step, grpc.StatusCode.INVALID_ARGUMENT, str(problem))

    def close(self) -> None:
        """Drop what is still running; nothing of it is learned."""
        for indexing in self._indexing.values():
            indexing.task.cancel()
        self.namespace.release(self._drafter)

    def _apply(self, request: pb.DraftRequest) -> pb.DraftResponse:
        in_batch = len(request.batch.sequence_ids) // 8
        if in_batch > MOST_FIELDS:
            raise WireError(f"batch.sequence_ids has {in_batch} elements; at most {MOST_FIELDS} are possible")
        begins = [read_begin(message, index) for index, message in enumerate(request.starts)]
        new = {begin.sequence_id for begin in begins}
        if begins:
            self._check_begins(begins, new)
        ends = [read_end(message, index) for index, message in enumerate(request.finishes)]
        if ends:
            self._check_ends(ends, new)
        batch = None
        if request.HasField("batch"):
            batch = read_batch(request.batch)
            steps = read_steps(request.batch, len(batch.sequence_ids))
            self._check_batch(batch, new)
        # Nothing below can fail.
        for begin in begins:
            self._begin(begin)
        lost = [end.sequence_id for end in ends if not self._end(end)]
        if request.HasField("counters"):
            self._note_counters(request.counters)
        if batch is None:
            return pb.DraftResponse(
                step=request.step, drafts=drafts_message(DraftBatch.empty(0)), lost_ids=_packed_ids(lost)
            )
        if self.namespace.passages is not None:
            self._note_passages(batch, self.namespace.passages)
        drafts, lost_in_batch = self._draft(batch)
        self._make_room()
        self.namespace.stats.counters.steps[STEPS] += steps
        return pb.DraftResponse(
            step=request.step, drafts=drafts_message(drafts), lost_ids=_packed_ids(lost + lost_in_batch)
        )

    def _check_ends(self, ends: list[End], new: set[int]) -> None:
        """Counts must be possible; for sequences that are not known they do not matter."""
        if len({end.sequence_id for end in ends}) < len(ends):
            raise WireError("finishes names a sequence twice")
        offered = self._drafter.offered_to([end.sequence_id for end in ends])
        for index, (end, most) in enumerate(zip(ends, offered.tolist(), strict=True)):
            is_known = most >= 0 or end.sequence_id in new
            if is_known and end.verified > max(0, most):
                raise WireError(
                    f"finishes[{index}].verified is {end.verified}; the sequence's last draft had {max(0, most)} tokens"
                )

    def _check_begins(self, begins: list[Begin], new: set[int]) -> None:
        """Sequences must be new, and there must be room: what is being indexed cannot be let go for it."""
        if len(new) < len(begins) or not new.isdisjoint(self._used):
            raise WireError("starts names a sequence that is running already")
        tokens = sum(len(begin.prompt) + len(begin.committed) for begin in begins)
        tokens += sum(self._used[sequence_id] for sequence_id in self._indexing)
        if tokens > self._limits.stream_tokens:
            raise WireError(f"starts brings {tokens} tokens at once; a stream may have {self._limits.stream_tokens}")

    def _check_batch(self, batch: Progress, new: set[int]) -> None:
        """Counts must be possible; for sequences that are not known they do not matter."""
        offered = self._drafter.offered_to(batch.sequence_ids.tolist())
        wrong = (offered >= 0) & (batch.verified > offered)
        if new:
            wrong |= np.isin(batch.sequence_ids, np.array(list(new), np.uint64)) & (batch.verified > 0)
        if wrong.any():
            index = int(wrong.argmax())
            raise WireError(
                f"batch.verified[{index}] is {batch.verified[index]}; the sequence's last draft had "
                f"{max(0, int(offered[index]))} tokens"
            )

    def _begin(self, begin: Begin) -> None:
        opening = self._drafter.open(
            begin.prompt,
            committed=begin.committed,
            session_id=begin.session,
            request_id=begin.request,
            learn=begin.learn and self._may_learn,
        )
        sequence_id = begin.sequence_id
        self._used[sequence_id] = len(opening.text)
        self._tokens += len(opening.text)
        self._make_room()
        if len(opening.text) < LONG_PROMPT:
            self._drafter.begin(sequence_id, opening)
        else:
            task = asyncio.get_running_loop().create_task(self._index(sequence_id, opening))
            self._indexing[sequence_id] = Indexing(task, opening)

    async def _index(self, sequence_id: int, opening: Opening) -> None:
        try:
            await asyncio.to_thread(opening.index)
        except MemoryError:
            del self._indexing[sequence_id]
            self._lose(sequence_id)
            return
        indexing = self._indexing.pop(sequence_id)
        self._drafter.begin(sequence_id, opening)
        self._drafter.draft(_told([sequence_id], [np.concatenate([NO_TOKENS, *indexing.committed])]))

    def _end(self, end: End) -> bool:
        """End a sequence; whether it was known."""
        if end.sequence_id not in self._used:
            return False
        self._lose(end.sequence_id)
        learn = end.learn and self._may_learn
        indexing = self._indexing.pop(end.sequence_id, None)
        if indexing is not None:
            indexing.task.cancel()
            self._end_unindexed(indexing, end, learn)
            return True
        self._drafter.finish(end.sequence_id, end.tokens, verified=end.verified, learn=learn)
        self.namespace.stats.counters.steps[STEPS] += end.steps - 1 if len(end.tokens) else 0
        return True

    def _end_unindexed(self, indexing: Indexing, end: End, learn: bool) -> None:
        """End a sequence whose index is of no use any more."""
        running = indexing.opening.running
        committed = np.concatenate([*indexing.committed, end.tokens])
        if len(committed):
            self.namespace.stats.record_path(len(committed), 0, 0)
        if learn and running.learn:
            self.namespace.learn(np.concatenate([indexing.opening.learned, committed]), running.request_id)

    def _draft(self, batch: Progress) -> tuple[DraftBatch, list[int]]:
        """Drafts, and which sequences are not known."""
        ids = batch.sequence_ids.tolist()
        are_known = self._note_committed(ids, batch)
        if are_known and not self._indexing:
            return self._drafter.draft(batch), []
        return self._draft_some(batch, ids)

    def _note_committed(self, ids: list[int], batch: Progress) -> bool:
        """The sequences of a batch were heard of, and have more tokens; whether all of them are known."""
        used, are_known = self._used, True
        bounds = batch.offsets.tolist()
        for index, sequence_id in enumerate(ids):
            tokens = used.pop(sequence_id, None)
            if tokens is None:
                are_known = False
            else:
                committed = bounds[index + 1] - bounds[index]
                used[sequence_id] = tokens + committed
                self._tokens += committed
        return are_known

    def _draft_some(self, batch: Progress, ids: list[int]) -> tuple[DraftBatch, list[int]]:
        """Drafts for those of a batch that are known and ready."""
        lost, ready = [], []
        for index, sequence_id in enumerate(ids):
            indexing = self._indexing.get(sequence_id)
            if indexing is not None:
                indexing.committed.append(batch.tokens[batch.offsets[index] : batch.offsets[index + 1]].copy())
            elif sequence_id in self._used:
                ready.append(index)
            else:
                lost.append(sequence_id)
        return _spread(self._drafter.draft(_part(batch, ready)), ready, len(ids)), lost

    def _lose(self, sequence_id: int) -> None:
        self._tokens -= self._used.pop(sequence_id)

    def _make_room(self) -> None:
        """Let sequences go that were silent for longest, until the rest is within the limits."""
        limits = self._limits
        if len(self._used) <= limits.sequences and self._tokens <= limits.stream_tokens:
            return
        for sequence_id in [sequence_id for sequence_id in self._used if sequence_id not in self._indexing]:
            self._lose(sequence_id)
            self._drafter.finish(sequence_id, NO_TOKENS, learn=False)
            if len(self._used) <= limits.sequences and self._tokens <= limits.stream_tokens:
                return

    def _note_passages(self, batch: Progress, passages: Passages) -> None:
        for index, verified in enumerate(batch.verified.tolist()):
            first, end = batch.offsets[index : index + 2].tolist()
            # The last token is the target's own.
            passages.note(batch.tokens[first : min(end - 1, first + verified)], self.namespace.corpus)

    def _note_counters(self, counters: pb.ClientCounters) -> None:
        """Add what grew since the client last said its totals."""
        totals = ClientTotals(**{name: getattr(counters, name) for name in vars(self.namespace.clients)})
        reported = self._reported
        if reported is None:
            # A client that has come back told most of it before, to a session that is gone.
            reported = replace(totals, reconnects=totals.reconnects - 1) if totals.reconnects else ClientTotals()
        for name, total in vars(totals).items():
            grown = max(0, total - getattr(reported, name))
            setattr(self.namespace.clients, name, getattr(self.namespace.clients, name) + grown)
        self._reported = totals


def refusal(step: int, status: grpc.StatusCode, message: str) -> pb.DraftResponse:
    """The response to a request that has no effect."""
    return pb.DraftResponse(step=step, error=pb.Error(code=status.value[0], message=message))


def _packed_ids(ids: list[int]) -> bytes:
    return pack(np.array(ids, np.uint64), "u8") if ids else b""


def _told(ids: list[int], runs: list[np.ndarray]) -> Progress:
    """A batch that tells what was committed and wants no drafts."""
    nothing = np.zeros(len(ids), np.uint32)
    offsets = offsets_of(np.array([len(run) for run in runs], np.uint32))
    return Progress(np.array(ids, np.uint64), np.concatenate([NO_TOKENS, *runs]), offsets, nothing, nothing)


def _part(batch: Progress, indices: list[int]) -> Progress:
    """Some sequences of a batch."""
    at = np.array(indices, np.int64)
    runs = [batch.tokens[batch.offsets[index] : batch.offsets[index + 1]] for index in indices]
    return Progress(
        batch.sequence_ids[at],
        np.concatenate([NO_TOKENS, *runs]),
        offsets_of(np.array([len(run) for run in runs], np.uint32)),
        batch.verified[at],
        batch.max_draft[at],
        batch.cost,
    )


def _spread(drafts: DraftBatch, indices: list[int], sequences: int) -> DraftBatch:
    """Drafts for some sequences as drafts for all of a batch; the others have none."""
    lengths = np.zeros(sequences, np.uint32)
    lengths[indices] = np.diff(drafts.offsets)
    return replace(drafts, offsets=offsets_of(lengths))
