"""The client's side of the protocol, without connections and threads.

Input: calls of the engine and responses of the service. Output: requests and drafts. The caller sends
`pending.take_outgoing()` after every call. One thread at a time may use it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic

import numpy as np

from drafter_service.client.messages import (
    Counters,
    OutgoingRequest,
    RefusedError,
    Welcome,
    read_draft_response,
)
from drafter_service.client.pending import PendingRequests, Phase
from drafter_service.client.registration import Registration
from drafter_service.client.sequences import RunningSequences, SequenceInfo
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import (
    MAX_NAME_BYTES,
    MAX_STEP_TIMES,
    PROTOCOL,
    WireError,
    batch_message,
    unpack,
)
from ssd.corpus.ring import check_tokens
from ssd.corpus.rollout import Rollout
from ssd.types import DraftBatch, Progress, StepTime, check_verified

COUNTERS_EVERY = 64
"""Number of batches between two messages with counters."""

NO_IDS: frozenset[int] = frozenset()

Subset = np.ndarray | slice
"""Some sequences of a batch: their indices, int64 [A], or a slice."""
ALL, NONE = slice(None), slice(0)


@dataclass(slots=True, eq=False)
class Turn:
    """One request for drafts by the engine, from its call to its drafts."""

    rows: np.ndarray
    """int64 [B]: rows of the sequences."""
    limits: np.ndarray
    """uint32 [B]: maximum number of draft tokens."""
    requested: Subset = field(default_factory=lambda: NONE)
    """The sequences of the batch whose drafts were requested."""
    step: int | None = None
    """Number of the request; None if none was sent."""


class Protocol:
    """State of the client's sequences and of its stream."""

    def __init__(self, hello: pb.Hello, *, shadow: bool = False, clock: Callable[[], float] = monotonic) -> None:
        """shadow: whether all drafts are withheld."""
        self.pending = PendingRequests(clock)
        self.welcome: Welcome | None = None
        """The service's last welcome."""
        self._counters = Counters()
        self._hello = hello
        self._shadow = shadow
        self._name = secrets.token_hex(16)
        """Prefix of generated request names."""
        self._has_connected = False
        self._started = 0
        self._batches = 0
        self._vocab_size = hello.model.vocab_size
        self._unsent_times: Sequence[StepTime] = ()
        """Durations of steps that no request has had room for."""
        self._pause_steps = 0
        """`DraftBatch.pause_steps` of the responses since drafts were last returned."""
        self._running = RunningSequences(self._vocab_size)
        self._registration = Registration(self._running, self.pending)

    @property
    def counters(self) -> Counters:
        """Totals since the client was made."""
        self._counters.dropped = self.pending.dropped
        self._counters.unlearned = self._registration.discarded
        return self._counters

    @property
    def namespace(self) -> str:
        """Name of the namespace; before the first connection the requested name."""
        return self._hello.namespace if self.welcome is None else self.welcome.namespace

    # Calls of the engine.

    def start(
        self,
        sequence_id: int,
        prompt: np.ndarray,
        *,
        hints: np.ndarray | None = None,
        session_id: str | None = None,
        request_id: str | None = None,
        learn: bool = True,
        rollout: Rollout | None = None,
        seed: int | None = None,
    ) -> None:
        """Begin a sequence.

        Raises ValueError for an id in use, a token id that is reserved or outside the model's vocabulary, and a name
        that is too long.
        """
        if sequence_id in self._running.row_of:
            raise ValueError(f"sequence {sequence_id} is already running")
        check_tokens(prompt, self._vocab_size)
        hints = np.array([] if hints is None else hints, np.uint32)
        check_tokens(hints, self._vocab_size)
        for what, name in (("session_id", session_id), ("request_id", request_id)):
            if name is not None and len(name.encode()) > MAX_NAME_BYTES:
                raise ValueError(f"{what} has {len(name.encode())} bytes; the maximum is {MAX_NAME_BYTES}")
        self._started += 1
        # A sequence that is registered again keeps its name, so that it is learned once.
        name = request_id or f"{self._name}-{self._started}"
        info = SequenceInfo(
            np.array(prompt, np.uint32), hints, session_id or "", name, learn, self._shadow, rollout, seed
        )
        self._registration.start(self._running.add(sequence_id, info))

    def draft(self, progress: Progress) -> Turn:
        """Record committed tokens, and request drafts.

        Call `settle` once `is_settled`, or at the deadline. Raises ValueError as `Progress.check`, and for a token id
        outside the model's vocabulary.
        """
        batch = self._running.batch_of(progress)
        rows = batch.rows
        turn = Turn(rows, progress.max_draft)
        may_request = self.pending.may_request_drafts()
        if self._unsent_times:
            progress = replace(progress, step_times=[*self._unsent_times, *progress.step_times])
        self._unsent_times = ()
        if may_request and batch.are_current:
            self._running.forward(batch, progress)
            self._request_drafts(turn, ALL, progress, batch.wire_ids)
            return turn
        self._running.commit(rows, progress)
        registered = self._running.are_registered(rows).nonzero()[0]
        if may_request and len(registered):
            unsent = self._running.take_unsent(rows[registered], registered, progress)
            self._request_drafts(turn, registered, unsent)
        else:
            self._unsent_times = progress.step_times[-MAX_STEP_TIMES:]
            if not may_request and len(rows):
                self._counters.timeouts += self.pending.phase is Phase.READY
        self._registration.send_running()  # After the batch, so that the batch does not wait for it.
        return turn

    def is_settled(self, turn: Turn) -> bool:
        """Return whether the drafts have arrived, or can no longer arrive."""
        return turn.step is None or not self.pending.is_waiting(turn.step)

    def settle(self, turn: Turn) -> DraftBatch:
        """End a turn and return the drafts that have arrived."""
        drafts = self._take_drafts(turn)
        if drafts is None:
            drafts = DraftBatch.empty(len(turn.limits))
        drafts.pause_steps, self._pause_steps = self._pause_steps, 0
        self._running.set_offered(turn.rows, drafts.offsets[1:] - drafts.offsets[:-1])
        return drafts

    def finish(self, sequence_id: int, tokens: np.ndarray, *, verified: int, steps: int, learn: bool) -> None:
        """End a sequence. Raises ValueError as `Drafter.finish`."""
        running = self._running
        check_tokens(tokens, self._vocab_size)
        row = running.row_of.get(sequence_id)
        rows = np.array([] if row is None else [row], np.int64)
        check_verified(sequence_id, verified, dict(zip([sequence_id], running.offered(rows), strict=False)))
        running.commit(rows, Progress.of_one(sequence_id, tokens, verified=verified, steps=steps))
        self._registration.finish(running.remove(sequence_id, learn))

    def forget(self, request_id: str) -> None:
        """Prevent learning from sequences of this name that were not sent completely."""
        self._registration.forget(request_id)

    def send_draft_counts(self, counts: pb.DraftCounts) -> None:
        """Send counts of draft tokens that this process has drafted."""
        if self.pending.may_send:
            self.pending.send(OutgoingRequest(pb.DraftRequest(draft_counts=counts)))

    def close(self) -> None:
        """Send the ends of all finished sequences, and the counters. Running sequences are not learned."""
        if self.pending.may_send:
            while self._registration.send_finished():
                pass
            self.pending.send(OutgoingRequest(pb.DraftRequest(counters=self.counters.message())))

    # Events of the connection.

    def connected(self) -> None:
        """Begin a stream. Only the hello is sent until it is answered."""
        hello = pb.Hello()
        hello.CopyFrom(self._hello)
        self.pending.open(hello)

    def receive(self, response: pb.DraftResponse) -> None:
        """Process a response.

        Raises RefusedError if the service refuses this client, and WireError if it violates the protocol; the caller
        then closes the stream.
        """
        is_handshake = self.pending.phase is not Phase.READY
        self.pending.receive(response)
        if is_handshake:
            self._receive_welcome(response.welcome)
        else:
            self._pause_steps = max(self._pause_steps, response.drafts.pause_steps)  # Of late responses, too.
            lost = {*unpack(response.lost_ids, "u8", "lost_ids").tolist()} if response.lost_ids else NO_IDS
            self._counters.resyncs += self._registration.answered(response.step, lost)
        self._registration.send_finished()
        self._registration.send_running()

    def disconnected(self) -> None:
        """Record that the stream has ended, so that the service has none of this client's sequences."""
        self.pending.close()
        self._counters.resyncs += self._registration.connection_lost()

    def _receive_welcome(self, welcome: pb.Welcome) -> None:
        if welcome.protocol != PROTOCOL:
            raise RefusedError(f"it does not use protocol {PROTOCOL}; upgrade it to the version of this client")
        fields = {name: getattr(welcome, name) for name in Welcome.__dataclass_fields__}
        self.welcome = Welcome(**fields)
        self._counters.reconnects += self._has_connected
        self._has_connected = True
        self._registration.begin(welcome)

    def _request_drafts(self, turn: Turn, subset: Subset, progress: Progress, wire_ids: bytes | None = None) -> None:
        request = pb.DraftRequest()
        batch_message(progress, wire_ids, request.batch)
        self._batches += 1
        if self._batches % COUNTERS_EVERY == 0:
            request.counters.CopyFrom(self.counters.message())
        turn.requested, turn.step = subset, self.pending.request_drafts(request)

    def _take_drafts(self, turn: Turn) -> DraftBatch | None:
        """Return the drafts of a turn; None if they have not arrived or cannot be read."""
        if turn.step is None or self.pending.is_cut(turn.step):
            return None
        message = self.pending.take_drafts()
        if message is None:
            self._counters.timeouts += 1
            return None
        limits = turn.limits[turn.requested]
        try:
            drafts, malformed = read_draft_response(message, limits, self._vocab_size)
        except WireError:
            self._counters.malformed += len(limits)
            return None
        self._counters.malformed += malformed
        if isinstance(turn.requested, slice):
            return drafts
        return drafts.scatter(turn.requested, len(turn.limits))
