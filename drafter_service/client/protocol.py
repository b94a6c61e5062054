"""The client's side of the protocol, without a connection and without a thread.

Calls of the engine and responses of the service go in; requests and drafts come out. The caller sends
`pending.take_outgoing()` after every call, and lets one thread at a time in.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

import numpy as np

from drafter_service.client.messages import (
    Counters,
    OutgoingRequest,
    RefusedError,
    read_draft_response,
)
from drafter_service.client.pending import PendingRequests, Phase
from drafter_service.client.registration import Registration
from drafter_service.client.sequences import RunningSequences, SequenceInfo
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import MAX_NAME_BYTES, PROTOCOL, WireError, batch_message, outcomes_message, unpack
from ssd.corpus.ring import check_tokens
from ssd.types import DraftBatch, Outcomes, Progress, check_verified, offsets_of

COUNTERS_EVERY = 64
"""Batches between two messages with counters."""

NO_IDS: frozenset[int] = frozenset()

Subset = np.ndarray | slice
"""Some sequences of a batch: their indices, int64 [A], or a slice."""
ALL, NONE = slice(None), slice(0)


@dataclass(slots=True, eq=False)
class Turn:
    """One step of the engine, from its call to the drafts that it gets."""

    rows: np.ndarray | None
    """int64 [B]: the sequences that get a draft; None for drafts after possible outcomes, which nothing is based on."""
    limits: np.ndarray
    """uint32 [B] or [K]: how many draft tokens the engine can use."""
    asked: Subset = field(default_factory=lambda: NONE)
    """The sequences of the batch, or the outcomes, for which the service was asked."""
    step: int | None = None
    """The number of that request; None if the service was not asked."""


class Protocol:
    """What the client knows of its sequences and of the service."""

    def __init__(self, hello: pb.Hello, *, clock: Callable[[], float] = monotonic) -> None:
        self.pending = PendingRequests(clock)
        self.namespace = hello.namespace
        """As the service named it last."""
        self._counters = Counters()
        self._hello = hello
        self._name = secrets.token_hex(16)
        """Prefix of the names of requests that the engine gives none."""
        self._has_connected = False
        self._started = 0
        self._batches = 0
        self._running = RunningSequences()
        self._registration = Registration(self._running, self.pending)

    @property
    def counters(self) -> Counters:
        """Totals since the client was made."""
        self._counters.dropped = self.pending.dropped
        self._counters.unlearned = self._registration.discarded
        return self._counters

    # Calls of the engine.

    def start(
        self, sequence_id: int, prompt: np.ndarray, *, session_id: str | None, request_id: str | None, learn: bool
    ) -> None:
        """Begin a sequence. Raises ValueError for an id in use, a reserved token id, and a name that is too long."""
        if sequence_id in self._running.row_of:
            raise ValueError(f"sequence {sequence_id} was started before and not finished")
        check_tokens(prompt)
        for what, name in (("session_id", session_id), ("request_id", request_id)):
            if name is not None and len(name.encode()) > MAX_NAME_BYTES:
                raise ValueError(f"{what} has {len(name.encode())} bytes; at most {MAX_NAME_BYTES} are possible")
        self._started += 1
        # Registered again, a sequence keeps its name, so that it is learned once.
        name = request_id or f"{self._name}-{self._started}"
        info = SequenceInfo(np.array(prompt, np.uint32), session_id or "", name, learn)
        self._registration.start(self._running.add(sequence_id, info))

    def draft(self, progress: Progress) -> Turn:
        """Record what was committed, and ask the service for drafts.

        Call `settle` once `is_settled`, or when there is no more time. Raises ValueError as `Progress.check`.
        """
        rows = self._running.rows_of(progress)
        turn = Turn(rows, progress.max_draft)
        may_ask = self.pending.may_ask()
        if may_ask and self._running.are_current(rows):
            self._ask(turn, ALL, self._running.forward(rows, progress))
            return turn
        self._running.commit(rows, progress)
        asked = self._running.are_registered(rows).nonzero()[0]
        if may_ask and len(asked):
            self._ask(turn, asked, self._running.take_unsent(rows[asked], progress.max_draft[asked], progress.cost))
        elif not may_ask and len(rows):
            self._counters.timeouts += self.pending.phase is Phase.READY
        self._registration.send_running()  # Behind the batch, so that the batch does not wait for it.
        return turn

    def propose_after(self, outcomes: Outcomes) -> Turn:
        """Ask for drafts after possible outcomes, of the sequences whose last draft is the service's last one.

        Raises ValueError for a sequence that was not started, a reserved token id, and too many accepted tokens.
        """
        check_tokens(outcomes.bonus)
        rows = self._running.rows(outcomes.sequence_ids.tolist())
        bounds = outcomes.offsets.astype(np.int64)
        counts = bounds[1:] - bounds[:-1]
        if np.count_nonzero(outcomes.accepted > self._running.offered(rows).repeat(counts)):
            raise ValueError("an outcome has more accepted tokens than the sequence's last draft")
        turn = Turn(None, outcomes.max_draft.repeat(counts))
        is_asked = self._running.is_current(rows)
        if self.pending.may_send and is_asked.any():
            turn.asked = is_asked.repeat(counts).nonzero()[0]
            asked = Outcomes(
                sequence_ids=self._running.wire_ids(rows[is_asked]).astype(np.uint64),
                offsets=offsets_of(counts[is_asked]),
                accepted=outcomes.accepted[turn.asked],
                bonus=outcomes.bonus[turn.asked],
                max_draft=outcomes.max_draft[is_asked],
                cost=outcomes.cost,
            )
            turn.step = self.pending.ask(pb.DraftRequest(outcomes=outcomes_message(asked)))
        return turn

    def is_settled(self, turn: Turn) -> bool:
        """Whether the drafts have come, or cannot come any more."""
        return turn.step is None or not self.pending.is_waiting(turn.step)

    def settle(self, turn: Turn) -> DraftBatch:
        """End a turn and return its drafts, as far as they have come."""
        drafts = self._take_drafts(turn)
        if drafts is None:
            drafts = DraftBatch.empty(len(turn.limits))
        if turn.rows is not None:
            self._running.set_offered(turn.rows, drafts.offsets[1:] - drafts.offsets[:-1])
        return drafts

    def finish(self, sequence_id: int, tokens: np.ndarray, *, verified: int, learn: bool) -> None:
        """End a sequence. Raises ValueError as `Drafter.finish`."""
        running = self._running
        check_tokens(tokens)
        row = running.row_of.get(sequence_id)
        rows = np.array([] if row is None else [row], np.int64)
        check_verified(sequence_id, verified, dict(zip([sequence_id], running.offered(rows), strict=False)))
        running.commit(rows, Progress.of_one(sequence_id, tokens, verified=verified))
        self._registration.finish(running.remove(sequence_id, learn))

    def forget(self, request_id: str) -> None:
        """Let nothing be learned from sequences of this name that the service was not sent completely."""
        self._registration.forget(request_id)

    def close(self) -> None:
        """Send the ends of all finished sequences, and the counters. Nothing of what still runs is learned."""
        if self.pending.may_send:
            while self._registration.send_finished():
                pass
            self.pending.send(OutgoingRequest(pb.DraftRequest(counters=self.counters.message())))

    # Events of the connection.

    def connected(self) -> None:
        """Begin a stream. Nothing but the hello is sent until it is answered."""
        hello = pb.Hello()
        hello.CopyFrom(self._hello)
        self.pending.open(hello)

    def receive(self, response: pb.DraftResponse) -> None:
        """Process a response.

        Raises RefusedError for a service that does not serve this client, and WireError for one that violates the
        protocol; the stream is to be closed then.
        """
        is_handshake = self.pending.phase is not Phase.READY
        self.pending.receive(response)
        if is_handshake:
            self._receive_welcome(response.welcome)
        else:
            lost = {*unpack(response.lost_ids, "u8", "lost_ids").tolist()} if response.lost_ids else NO_IDS
            self._counters.resyncs += self._registration.answered(response.step, lost)
        self._registration.send_finished()
        self._registration.send_running()

    def disconnected(self) -> None:
        """Record that the stream has ended, and with it all that the service has of this client's sequences."""
        self.pending.close()
        self._counters.resyncs += self._registration.connection_lost()

    def _receive_welcome(self, welcome: pb.Welcome) -> None:
        if welcome.protocol != PROTOCOL:
            raise RefusedError(f"it does not speak protocol {PROTOCOL}; upgrade it to the version of this client")
        self.namespace = welcome.namespace
        self._counters.reconnects += self._has_connected
        self._has_connected = True
        self._registration.begin(welcome)

    def _ask(self, turn: Turn, asked: Subset, progress: Progress) -> None:
        request = pb.DraftRequest(batch=batch_message(progress))
        self._batches += 1
        if self._batches % COUNTERS_EVERY == 0:
            request.counters.CopyFrom(self.counters.message())
        turn.asked, turn.step = asked, self.pending.ask(request)

    def _take_drafts(self, turn: Turn) -> DraftBatch | None:
        """Return the drafts of a turn; None if they have not come or cannot be read."""
        if turn.step is None or self.pending.is_cut(turn.step):
            return None
        message = self.pending.take_drafts()
        if message is None:
            self._counters.timeouts += 1
            return None
        limits = turn.limits[turn.asked]
        try:
            drafts, malformed = read_draft_response(message, limits, self._hello.model.vocabulary_size)
        except WireError:
            self._counters.malformed += len(limits)
            return None
        self._counters.malformed += malformed
        if isinstance(turn.asked, slice):
            return drafts
        return drafts.scatter(turn.asked, len(turn.limits))
