"""The client's side of the protocol, without connections and threads.

Input: calls of the engine and responses of the service. Output: drafts, and requests, which are passed to the function
of the stream that sends them. One thread at a time may use it.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from time import monotonic
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from drafter_service.client.connection import RefusedError
from drafter_service.client.identity import process_name
from drafter_service.client.pending import Pending, PendingRequests, Phase, Send
from drafter_service.client.sequences import PART_SEQUENCES, TOKEN_BYTES, RemoteSequence, Sequences
from drafter_service.observability.process import own_version
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import (
    MAX_STEP_TIMES,
    PROTOCOL,
    SHAPE_CODES,
    WireError,
    batch_message,
    check_engine_name,
    pack,
    read_drafts,
    start_message,
    unpack,
)
from ssd.budget.padding import NO_PADDING, Padding
from ssd.config import DraftShape, check_cost
from ssd.corpus.ring import any_of, check_tokens
from ssd.types import DraftBatch, Progress, StepTime, check_path_prob, check_verified, offsets_of

if TYPE_CHECKING:  # It imports numba.
    from drafter_service.observability.facts import ModelIdentity

COUNTERS_EVERY = 64
"""Number of batches between two messages with counters."""

NO_IDS: frozenset[int] = frozenset()


@dataclass(frozen=True)
class NamespaceState:
    """A namespace in use, and how much it held before."""

    namespace: str
    tokens: int | None = None
    """None if the service does not say."""
    other: str = ""
    """If it is empty: another namespace with text of the same tokenizer, which the caller may read."""
    other_tokens: int = 0
    """Number of tokens of the other one; 0 if it is not known."""

    @classmethod
    def of(cls, message: pb.Welcome | pb.ObserveResponse) -> NamespaceState:
        """Return the state in a response of the service."""
        held = message.held
        tokens = held.tokens if message.HasField("held") else None
        return cls(message.namespace, tokens, held.other, held.other_tokens)

    def __str__(self) -> str:
        return self.namespace if self.tokens is None else f"{self.namespace} ({self.tokens:,} tokens)"

    def advice(self, how: str) -> str:
        """Return a warning about text that is not used, "" if none is needed. how: what to do, with {} for a name."""
        if not self.other:
            return ""
        tokens = f"{self.other_tokens:,} tokens" if self.other_tokens else "text"
        return (
            f"namespace {self.namespace} is empty, but namespace {self.other} holds {tokens} of the same tokenizer; "
            f"to use that one, {how.format(self.other)}"
        )


@dataclass(frozen=True)
class Welcome:
    """What the service allows a client, as it says when they connect."""

    namespace: str
    may_learn: bool
    """Whether the service learns from this client."""
    max_draft: int
    """Maximum number of tokens in a draft."""
    max_sequences: int
    """Maximum number of running sequences that have drafts; 0: unknown."""
    max_tokens: int
    """Maximum sum of their tokens, prompts included; 0: unknown."""
    namespace_state: NamespaceState
    """The namespace as it was then."""


@dataclass
class Counters:
    """Totals since the client was made."""

    timeouts: int = 0
    """Late steps: steps without drafts because the service was late, or was not called after it had been late."""
    dropped: int = 0
    """Responses that arrived after the deadline."""
    resyncs: int = 0
    """Running sequences that were registered again because the service had lost them."""
    reconnects: int = 0
    """Connections after the first."""
    malformed: int = 0
    """Drafts that were too long, outside the vocabulary, or not well formed."""
    unlearned: int = 0
    """Sequences that were discarded instead of learned, because the queue was full, or because a token id is outside
    the namespace's vocabulary."""

    def message(self) -> pb.ClientCounters:
        """Return the counters that are sent to the service."""
        return pb.ClientCounters(
            timeouts=self.timeouts, dropped=self.dropped, resyncs=self.resyncs, reconnects=self.reconnects
        )


@dataclass(slots=True, eq=False)
class Turn:
    """One request for drafts by the engine, from its call to its drafts."""

    ids_as_bytes: bytes
    """The engine's ids of the sequences."""
    changes: int
    """`Sequences.changes` when the following two were read."""
    sequences: list[RemoteSequence]
    wire_ids: bytes
    """u64 [B], as in messages: ids of the sequences at the service."""
    offered: np.ndarray
    """uint32 [B]: number of tokens of each sequence's draft: the last one, and after the turn the new one."""
    limits: np.ndarray
    """uint32 [B]: maximum number of draft tokens."""
    requested: np.ndarray | None = None
    """Indices of the sequences whose drafts were requested, int64 [A]; None: all."""
    request: Pending | None = None
    """None if none was sent."""


class Protocol:
    """State of the client's sequences and of its stream."""

    def __init__(self, hello: pb.Hello, *, shadow: bool = False, clock: Callable[[], float] = monotonic) -> None:
        """shadow: whether all drafts are withheld."""
        self.pending = PendingRequests(clock)
        self.welcome: Welcome | None = None
        """The service's last welcome."""
        self._counters = Counters()
        self._hello = hello
        self._hello.counted.SetInParent()
        self._shadow = shadow
        self._name = secrets.token_hex(16)
        """Prefix of generated request names."""
        self._started = 0
        self._batches = 0
        self._vocab_size = hello.model.vocab_size
        self._unsent_times: Sequence[StepTime] = ()
        """Durations of steps that no request has had room for."""
        self._pause_steps = 0
        """`DraftBatch.pause_steps` of the responses since drafts were last returned."""
        self.sequences = Sequences(self.pending)
        self._last: Turn | None = None
        """The last turn: the next batch usually has the same sequences."""

    @property
    def counters(self) -> Counters:
        """Totals since the client was made."""
        self._counters.dropped = self.pending.dropped
        self._counters.unlearned = self.sequences.discarded
        return self._counters

    @property
    def namespace(self) -> str:
        """Name of the namespace; before the first connection the requested name."""
        return self._hello.namespace if self.welcome is None else self.welcome.namespace

    # Calls of the engine.

    def start(self, sequence_id: int, prompt: np.ndarray, **options: object) -> None:
        """Begin a sequence; prompt and options: as in `start_message`.

        Raises ValueError for an id in use, and as `start_message`.
        """
        if sequence_id in self.sequences.running:
            raise ValueError(f"sequence {sequence_id} is already running")
        self.sequences.start(sequence_id, self.start_message(prompt, **options))

    def start_message(self, prompt: np.ndarray, **options: object) -> pb.Start:
        """Return the start of a sequence with a name; see `start_message`.

        Raises ValueError for a token id that is reserved or outside the model's vocabulary, and a name that is too
        long.
        """
        info = start_message(prompt, **options, shadow=self._shadow, vocab_size=self._vocab_size)  # type: ignore[arg-type]
        self._started += 1
        # A sequence that is registered again keeps its name, so that it is learned once.
        info.request_id = info.request_id or f"{self._name}-{self._started}"
        return info

    def draft(self, progress: Progress) -> Turn:
        """Record committed tokens, and request drafts.

        Call `settle` once `is_settled`, or at the deadline. Raises ValueError as `Progress.check`, and for a token id
        outside the model's vocabulary.
        """
        turn = self._turn_of(progress)
        may_request = self.pending.may_request_drafts()
        sequences, behind = turn.sequences, self.sequences.behind
        if self.sequences.vocab_size:
            for sequence, tokens in zip(sequences, _split(progress), strict=True):
                self.sequences.check_vocabulary(sequence, tokens)
        if self._unsent_times:
            progress = replace(progress, step_times=[*self._unsent_times, *progress.step_times])
        self._unsent_times = ()
        if may_request and sequences and behind.isdisjoint(sequences):
            self._request_drafts(turn, None, progress, turn.wire_ids)
            for sequence, tokens in zip(sequences, _split(progress), strict=True):
                sequence.text += tokens
            return turn
        steps = [1] * len(sequences) if progress.steps is None else progress.steps.tolist()
        for sequence, *committed in zip(sequences, _split(progress), progress.verified.tolist(), steps, strict=True):
            sequence.commit(*committed)
        behind.update(sequences)
        registered = [index for index, sequence in enumerate(sequences) if sequence.wire_id]
        if may_request and registered:
            self._request_unsent(turn, np.array(registered, np.int64), progress)
        else:
            self._unsent_times = progress.step_times[-MAX_STEP_TIMES:]
            if not may_request and sequences:
                self._counters.timeouts += self.pending.phase is Phase.READY
        self.sequences.send_starts()  # After the batch, so that the batch does not wait for it.
        return turn

    def is_settled(self, turn: Turn) -> bool:
        """Return whether the drafts have arrived, or can no longer arrive."""
        return turn.request is None or turn.request.is_over

    def settle(self, turn: Turn) -> DraftBatch:
        """End a turn and return the drafts that have arrived."""
        drafts = self._take_drafts(turn)
        if drafts is None:
            drafts = DraftBatch.empty(len(turn.limits))
        drafts.pause_steps, self._pause_steps = self._pause_steps, 0
        turn.offered = drafts.offsets[1:] - drafts.offsets[:-1]
        for sequence, offered in zip(turn.sequences, turn.offered.tolist(), strict=True):
            sequence.offered = offered
        return drafts

    def finish(self, sequence_id: int, tokens: np.ndarray, *, verified: int, steps: int, learn: bool) -> None:
        """End a sequence. Raises ValueError as `Drafter.finish`."""
        check_tokens(tokens, self._vocab_size)
        sequence = self.sequences.running.get(sequence_id)
        check_verified(sequence_id, verified, {} if sequence is None else {sequence_id: sequence.offered})
        assert sequence is not None
        sequence.info.learn &= learn
        output = pack(tokens, "u4")
        self.sequences.check_vocabulary(sequence, output)
        sequence.commit(output, verified, steps)
        self.sequences.finish(sequence_id)

    def send_finished(self, finished: deque[tuple[RemoteSequence, np.ndarray, int]]) -> None:
        """Take the first sequences whose drafts were not requested, and send a part: their starts, and their outputs,
        uint32 [n], which were produced in a number of steps. The next parts follow the responses.
        """
        for _ in range(min(len(finished), PART_SEQUENCES)):
            sequence, output, steps = finished.popleft()
            sequence.commit(pack(output, "u4"), 0, steps)
            self.sequences.add_finished(sequence)
        self.sequences.send_more_ends()

    def forget(self, request_id: str) -> None:
        """Prevent learning from sequences of this name that were not sent completely."""
        self.sequences.forget(request_id)

    def send_draft_counts(self, counts: pb.DraftCounts) -> bool:
        """Send counts of draft tokens that this process has drafted; return whether that is possible now."""
        if self.pending.may_send:
            self.pending.send(pb.DraftRequest(draft_counts=counts))
        return self.pending.may_send

    def close(self) -> None:
        """Send the ends of all finished sequences, and the counters. Running sequences are not learned."""
        if self.pending.may_send:
            while self.sequences.send_ends():
                pass
            self.pending.send(pb.DraftRequest(counters=self.counters.message()))

    # Events of the connection.

    def connected(self, send: Send) -> None:
        """Begin a stream whose requests are passed to `send`. Only the hello is sent until it is answered."""
        self.pending.open(self._hello, send)

    def receive(self, data: bytes) -> None:
        """Process a serialized response.

        Raises RefusedError if the service refuses this client, and WireError if it violates the protocol; the caller
        then closes the stream.
        """
        is_handshake = self.pending.phase is not Phase.READY
        response, request = self.pending.receive(data)
        if request.counters is not None:
            self._hello.counted.CopyFrom(request.counters)
        if is_handshake:
            self._receive_welcome(response.welcome)
        else:
            self._pause_steps = max(self._pause_steps, response.drafts.pause_steps)  # Of late responses, too.
            lost = {*unpack(response.lost_ids, "u8", "lost_ids").tolist()} if response.lost_ids else NO_IDS
            self._counters.resyncs += self.sequences.answered(request, lost)
        self.sequences.send_more_ends()
        self.sequences.send_starts()

    def disconnected(self) -> None:
        """Record that the stream has ended, so that the service has none of this client's sequences."""
        self.pending.close()
        self._counters.resyncs += self.sequences.connection_lost()

    def _receive_welcome(self, welcome: pb.Welcome) -> None:
        if welcome.protocol != PROTOCOL:
            raise RefusedError(f"it does not use protocol {PROTOCOL}; upgrade it to the version of this client")
        fields = {name: getattr(welcome, name) for name in Welcome.__dataclass_fields__ if name != "namespace_state"}
        self._counters.reconnects += self.welcome is not None
        self.welcome = Welcome(**fields, namespace_state=NamespaceState.of(welcome))
        self.sequences.begin(welcome)
        self.sequences.vocab_size = 0 if self._vocab_size else welcome.vocab_size

    def _turn_of(self, progress: Progress) -> Turn:
        """Return a turn for the sequences of a batch. Raises ValueError as `Progress.check`."""
        progress.check_arrays()
        ids_as_bytes, changes, last = progress.sequence_ids.tobytes(), self.sequences.changes, self._last
        if last is not None and last.changes == changes and last.ids_as_bytes == ids_as_bytes:
            turn = Turn(ids_as_bytes, changes, last.sequences, last.wire_ids, last.offered, progress.max_draft)
        else:
            ids = progress.sequence_ids.tolist()
            try:
                sequences = [self.sequences.running[sequence_id] for sequence_id in ids]
            except KeyError:
                self._refuse(progress)
            if len({*ids}) < len(ids):
                self._refuse(progress)
            wire_ids = pack(np.array([each.wire_id for each in sequences], np.uint64), "u8")
            offered = np.array([each.offered for each in sequences], np.uint32)
            turn = Turn(ids_as_bytes, changes, sequences, wire_ids, offered, progress.max_draft)
        if any_of(progress.verified > turn.offered):
            self._refuse(progress)
        check_tokens(progress.tokens, self._vocab_size)
        if progress.cost is not None:
            check_cost(progress.cost)
        if progress.min_path_prob is not None:
            check_path_prob(progress.min_path_prob)
        self._last = turn
        return turn

    def _refuse(self, progress: Progress) -> NoReturn:
        """Raise the ValueError for an invalid batch."""
        progress.check({sequence_id: each.offered for sequence_id, each in self.sequences.running.items()})
        raise AssertionError("the batch is valid")

    def _request_unsent(self, turn: Turn, indices: np.ndarray, progress: Progress) -> None:
        """Request drafts after all unsent tokens of the registered sequences, at these indices, int64 [A]."""
        chosen = [turn.sequences[index] for index in indices.tolist()]
        verified = np.array([each.verified for each in chosen], np.uint32)
        steps = np.array([each.steps for each in chosen], np.uint32)
        unsent = [each.take_unsent() for each in chosen]
        self.sequences.behind.difference_update(chosen)
        part = replace(
            progress,
            sequence_ids=np.array([each.wire_id for each in chosen], np.uint64),
            tokens=unpack(b"".join(unsent), "u4", "tokens"),
            offsets=offsets_of(np.array([len(tokens) // TOKEN_BYTES for tokens in unsent], np.uint32)),
            verified=verified,
            max_draft=progress.max_draft[indices],
            steps=steps,
            other_sequences=progress.other_sequences + len(turn.sequences) - len(chosen),
        )
        self._request_drafts(turn, indices, part)

    def _request_drafts(
        self, turn: Turn, indices: np.ndarray | None, progress: Progress, wire_ids: bytes | None = None
    ) -> None:
        request = pb.DraftRequest()
        batch_message(progress, wire_ids, request.batch)
        self._batches += 1
        if self._batches % COUNTERS_EVERY == 0:
            request.counters.CopyFrom(self.counters.message())
        turn.requested, turn.request = indices, self.pending.send(request, wants_drafts=True)

    def _take_drafts(self, turn: Turn) -> DraftBatch | None:
        """Return the drafts of a turn; None if they have not arrived or cannot be read."""
        request = turn.request
        if request is None or (request.is_over and request.drafts is None):
            return None
        self.pending.stop_waiting(request)
        if request.drafts is None:
            self._counters.timeouts += 1
            return None
        limits = turn.limits if turn.requested is None else turn.limits[turn.requested]
        try:
            drafts, malformed = read_drafts(request.drafts, limits, self._vocab_size)
        except WireError:
            self._counters.malformed += len(limits)
            return None
        self._counters.malformed += malformed
        return drafts if turn.requested is None else drafts.scatter(turn.requested, len(turn.limits))


def hello_message(
    model: ModelIdentity | None,
    namespace: str,
    host: str = "",
    draft_shape: DraftShape | None = None,
    padding: Padding = NO_PADDING,
    engine: str = "",
) -> pb.Hello:
    """Return the first message of a stream: versions of host and client, the served model, shapes of drafts and steps.

    engine: name of the engine; "" for `process_name`. Raises ValueError for an unknown shape, and for an invalid name.
    """
    check_engine_name(engine)
    if draft_shape not in SHAPE_CODES:
        raise ValueError(f"draft_shape must be 'path', 'tree' or None, not {draft_shape!r}")
    return pb.Hello(
        protocol=PROTOCOL,
        client=f"{host} ssd-drafter/{own_version()}".strip(),
        model=pb.Model() if model is None else pb.Model(**vars(model)),
        namespace=namespace,
        draft_shape=SHAPE_CODES[draft_shape],
        step_sizes=pack(np.array(padding.sizes, np.uint32), "u4"),
        draft_lengths=pack(np.array(padding.lengths, np.uint32), "u4"),
        engine=engine or process_name(),
    )


def _split(progress: Progress) -> list[bytes]:
    """Return the committed tokens of each sequence, u32."""
    data = pack(progress.tokens, "u4")
    bounds = [TOKEN_BYTES * offset for offset in progress.offsets.tolist()]
    return [data[begin:end] for begin, end in pairwise(bounds)]
