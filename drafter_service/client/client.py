"""The client: an engine's calls, which never wait past a deadline, and a thread that keeps the connection."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING

import grpc
import numpy as np
import structlog

from drafter_service.auth.connector import ClientAccess, Connector
from drafter_service.client.connection import ConnectionState, RefusedError, StreamEnd, find_other_server
from drafter_service.client.protocol import Counters, Protocol, Turn, Welcome, hello_message
from drafter_service.client.streams import GrpcStream, SocketStream, Stream
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs import drafter_pb2_grpc
from drafter_service.transport.address import Address
from drafter_service.transport.wire import WireError
from ssd.budget.padding import NO_PADDING, Padding
from ssd.config import DraftShape
from ssd.corpus.ring import token_array
from ssd.corpus.rollout import Rollout
from ssd.errors import UserError
from ssd.types import PROPOSE_ID, DraftBatch, Drafter, Progress, check_sequence_id

if TYPE_CHECKING:  # It imports numba.
    from drafter_service.observability.facts import ModelIdentity

logger = structlog.get_logger(__name__)

DEADLINE_S = 0.002
"""Maximum wait for the drafts of one step, in seconds."""

PATIENCE_S = 30.0
"""Time after which an unanswered request means that the service has failed, even if its connection is open."""

CONNECT_TIMEOUT_S = 3.0
CLOSE_TIMEOUT_S = 2.0
FORGET_TIMEOUT_S = 60.0
"""Maximum duration of `forget` in seconds; it rebuilds a part of the index and saves the namespace."""

# Without a shared subchannel each channel connects at once, without gRPC's backoff; the client has its own.
CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)

NO_TOKENS = np.empty(0, np.uint32)

EXPECTED_ENDS = (grpc.RpcError, RefusedError, WireError, UserError)
"""Exceptions that end streams without a warning in the log."""


class DrafterClient(Drafter):
    """Client of a drafter service, with the interface of the embedded drafter.

    Only one thread may use it. `on_lost` and `on_resumed` may be called from another thread.
    """

    def __init__(
        self,
        address: str,
        *,
        deadline_s: float = DEADLINE_S,
        poll_s: float = 0.0,
        model: ModelIdentity | None = None,
        namespace: str = "",
        host: str = "",
        engine: str = "",
        access: ClientAccess | None = None,
        draft_shape: DraftShape | None = None,
        padding: Padding = NO_PADDING,
        shadow: bool = False,
        required: bool = True,
        on_welcome: Callable[[Welcome], None] = lambda _: None,
        on_lost: Callable[[str], None] = lambda _: None,
        on_resumed: Callable[[], None] = lambda: None,
    ) -> None:
        """Connect to the service at `address`, and reconnect after each loss.

        deadline_s: maximum wait for the drafts of a step. poll_s: time of that wait for which the step socket is polled
        before this process sleeps, which keeps the engine's core awake and warm; it takes a core of its own. model: the
        served model. namespace: name of the corpus; "" for the default namespace of the model. host: name and version
        of the engine for the service's report, such as "vllm/0.32.0". engine: name of this engine in reports and
        metrics, of at most 128 letters, digits and characters of "_.:@/-"; "": machine and process id, such as
        "node-3:4711". access: TLS files and bearer token. draft_shape: shape of the drafts that the engine verifies;
        None: as the service is configured. shadow: withhold all drafts; the service reports what they would have
        gained. required: raise UserError if no service answers, or it refuses; otherwise there are no drafts until one
        accepts. on_welcome: called once, when one accepts. on_lost: called with the reason, once for each loss of the
        connection. on_resumed: called after such a loss once the service has answered several requests again. Raises
        UserError for an invalid address and for unusable files, ValueError for a negative time, an unknown shape and an
        invalid name of an engine.
        """
        for name, seconds in (("deadline_s", deadline_s), ("poll_s", poll_s)):
            if not seconds >= 0:
                raise ValueError(f"{name} must be 0 s or more, not {seconds}")
        self.address = Address.parse(address).text
        self.transport = ""
        """Transport of the connection: "socket" for the step socket, "grpc", or "" while there is none."""
        self._connector = Connector(Address.parse(address), access or ClientAccess())
        self._deadline_s, self._poll_s = deadline_s, poll_s
        self._on_welcome: Callable[[Welcome], None] | None = on_welcome
        """None once it was called."""
        self._on_lost = on_lost
        self._on_resumed = on_resumed
        self._protocol = Protocol(hello_message(model, namespace, host, draft_shape, padding, engine), shadow=shadow)
        self._connection = ConnectionState(self.address, Random())
        self._process = os.getpid()
        self._is_required = required
        self._is_closing = False
        self._own_end: StreamEnd | None = None
        """Reason why this client ended the stream; None if it did not."""
        self._lock = threading.Lock()
        """Guards the protocol."""
        self._stream: Stream | None = None
        self._is_waiting = False
        """Whether the engine's thread receives the responses."""
        self._proposed: tuple[np.ndarray, int] | None = None
        """The context of the last `propose`, uint32 [N], and the length of its draft."""
        self._decided = threading.Event()
        """Set once the service has accepted this client, or has finally refused it."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ssd-client", daemon=True)
        self._thread.start()
        if required:
            self._await_welcome()

    @property
    def lost(self) -> str | None:
        """Reason why there is no connection; None while connected."""
        return self._connection.lost

    @property
    def is_refused(self) -> bool:
        """Whether the service has refused this client for good, such as for its tokenizer."""
        end = self._connection.last_end
        return self.lost is not None and end is not None and end.is_final

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection."""
        return self.lost is None

    @property
    def welcome(self) -> Welcome | None:
        """What the service allows, as of the last connection; None before the first."""
        return self._protocol.welcome

    @property
    def counters(self) -> Counters:
        """Totals since the client was made."""
        return self._protocol.counters

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
        """Begin a sequence with its prompt, uint32 [P].

        hints: uint32 [H], text that the output may repeat, such as the file that it edits; it is searched like the
        prompt and never learned. session_id: shared by the turns of a conversation. request_id: a name by which to
        `forget` what the sequence produces. Both have at most 512 bytes in UTF-8. learn: whether its text may be
        learned, and drafted for other sequences while it runs. rollout, seed: see `SuffixDrafter.start`. Raises
        ValueError for an id in use or outside 0 to 2^64 - 2, a token id that is reserved or outside the model's
        vocabulary, and a name that is too long.
        """
        check_sequence_id(sequence_id)
        self._queue(
            partial(
                self._protocol.start,
                sequence_id,
                prompt,
                hints=hints,
                session_id=session_id,
                request_id=request_id,
                learn=learn,
                rollout=rollout,
                seed=seed,
            )
        )

    def draft(self, progress: Progress) -> DraftBatch:
        """Send committed tokens and wait for drafts, at most until the deadline.

        Raises ValueError as `Progress.check`, and for a token id outside the model's vocabulary.
        """
        return self.begin_draft(progress)()

    def begin_draft(self, progress: Progress) -> Callable[[], DraftBatch]:
        """Send committed tokens, and return a function that waits for the drafts until the deadline, counted from now.

        The returned function must be called before any other method. It allows waiting for the drafts of several
        clients at once. Raises ValueError as `draft`.
        """
        self._check_process()
        with self._lock:
            turn = self._protocol.draft(progress)
            self._is_waiting = True
            return partial(self._await_drafts, turn, self._stream, time.monotonic() + self._deadline_s)

    def propose(self, context: Sequence[int] | np.ndarray, max_draft: int | None = None) -> DraftBatch:
        """Return a draft for a single context that is not a started sequence, as a batch of one sequence.

        context: token ids, a list or uint32 [N]. max_draft: maximum draft length; None: as the service is configured.
        The last context is kept, so that a call whose context extends it sends only the new tokens. Contexts are never
        learned. Raises ValueError for a token id that is reserved, negative or outside the model's vocabulary.
        """
        text = token_array(context)
        limit = (1 << 32) - 1 if max_draft is None else max(0, max_draft)
        before, verified = self._proposed or (None, 0)
        added = NO_TOKENS
        if before is not None and len(before) <= len(text) and np.array_equal(before, text[: len(before)]):
            added = text[len(before) :]
        else:
            if before is not None:
                self.finish(PROPOSE_ID, NO_TOKENS, learn=False)
            self._proposed = None
            self._queue(partial(self._protocol.start, PROPOSE_ID, text, session_id="propose", learn=False))
        verified = verified if len(added) else 0
        drafts = self.draft(Progress.of_one(PROPOSE_ID, added, verified=verified, max_draft=limit))
        self._proposed = text, len(drafts.tokens)
        return drafts

    def finish(
        self, sequence_id: int, tokens: np.ndarray, *, verified: int = 0, steps: int = 1, learn: bool = True
    ) -> None:
        """End a sequence; `tokens`, uint32 [n], were committed since its last draft, in this number of steps.

        Raises ValueError as `draft`.
        """
        self._queue(partial(self._protocol.finish, sequence_id, tokens, verified=verified, steps=steps, learn=learn))

    def forget(self, request_id: str) -> None:
        """Forget text learned under a name; running sequences of this name are not learned.

        Returns once no draft can contain it, which takes longer than a step. Raises UserError if the service cannot be
        reached, or the client lacks the right "admin".
        """
        self._check_process()
        with self._lock:
            self._protocol.forget(request_id)
            namespace, stream = self._protocol.namespace, self._stream
            self._is_waiting = True
        try:
            # Requests in flight may contain a sequence of this name.
            until = time.monotonic() + FORGET_TIMEOUT_S
            self._receive_until(lambda: not self._protocol.pending.has_pending, stream, until)
        finally:
            with self._lock:
                self._is_waiting = False
                self._watch()
        try:
            with self._connector.open(CHANNEL_OPTIONS) as channel:
                drafter_pb2_grpc.DrafterServiceStub(channel).Forget(
                    pb.ForgetRequest(namespace=namespace, request_id=request_id),
                    metadata=self._connector.metadata(),
                    timeout=FORGET_TIMEOUT_S,
                )
        except grpc.RpcError as problem:
            reason = self._connection.end_of(problem).reason
            raise UserError(f"the drafter at {self.address} did not forget {request_id!r}: {reason}") from None

    def close(self) -> None:
        """Let the service process all sent requests, then end the stream, within 4 s. `on_lost` may call this.

        Running sequences are not learned. In a forked child of the process that connected, only the descriptors of the
        connection are closed.
        """
        if self._is_fork:
            if self._stream is not None:
                self._stream.abandon()
            return
        self._stopping.set()
        with self._lock:
            self._is_closing = True
            is_heard = self._protocol.pending.may_send
            self._protocol.close()
            if self._stream is not None:
                self._stream.end()
            if not is_heard:
                self._cancel()
        if threading.current_thread() is self._thread:
            return
        self._thread.join(CLOSE_TIMEOUT_S)
        with self._lock:
            self._cancel()
        self._thread.join(CLOSE_TIMEOUT_S)

    def __enter__(self) -> DrafterClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The engine's thread.

    @property
    def _is_fork(self) -> bool:
        return os.getpid() != self._process

    def _check_process(self) -> None:
        """Raise UserError in a forked child, whose messages would mix with the parent's."""
        if self._is_fork:
            raise UserError(f"this client belongs to process {self._process}; make another one in each process")

    def _queue(self, change: Callable[[], None]) -> None:
        """Start or finish a sequence, for whose response no thread waits."""
        self._check_process()
        with self._lock:
            change()
            self._check_silence()
            self._watch()

    def _await_welcome(self) -> None:
        self._decided.wait(CONNECT_TIMEOUT_S)
        with self._lock:
            self._is_required = False
            failure = None if self.lost is None else self._connection.failure
        if failure is not None:
            self.close()
            raise failure

    def _await_drafts(self, turn: Turn, stream: Stream | None, until: float) -> DraftBatch:
        """Wait for the drafts of a turn until a time."""
        # Waiting here lets the service run if the engine's threads use every core.
        try:
            self._receive_until(lambda: self._protocol.is_settled(turn), stream, until)
        finally:  # Also after a KeyboardInterrupt.
            with self._lock:
                self._is_waiting = False
                if self._protocol.pending.has_pending:
                    self._receive()
                    self._check_silence()
                drafts = self._protocol.settle(turn)
                self._watch()
                news = self._take_news()
        self._notify(news)
        return drafts

    def _receive_until(self, condition: Callable[[], bool], stream: Stream | None, until: float) -> None:
        """Process responses until a condition holds, the stream is closed, or the time is `until`."""
        is_met = condition()
        while stream is not None and not is_met and stream.wait(until - time.monotonic()):
            with self._lock:
                self._receive()
                is_met = condition()

    def _check_silence(self) -> None:
        """End the stream if its oldest request has been unanswered for too long."""
        silent_s = self._protocol.pending.oldest_wait_s
        if silent_s > PATIENCE_S:
            self._leave(self._connection.end_of(f"it has not answered for {silent_s:.0f} s"))

    # Both threads, with the lock.

    def _watch(self) -> None:
        """Let the client's thread receive outstanding responses."""
        if self._stream is not None and self._protocol.pending.has_pending:
            self._stream.watch()

    def _take_news(self) -> list[tuple[str, Callable[[], None]]]:
        """Return the callbacks of the owner that are due, with their names."""
        news: list[tuple[str, Callable[[], None]]] = []
        if self.welcome is not None and self._on_welcome is not None:
            news.append(("on_welcome", partial(self._on_welcome, self.welcome)))
            self._on_welcome = None
        if self._connection.take_resumption():
            news.append(("on_resumed", self._on_resumed))
        return news

    def _receive(self) -> None:
        try:
            for response in [] if self._stream is None else self._stream.receive():
                if self._own_end is None:
                    self._protocol.receive(response)
                    self._connection.response_received()
        except (RefusedError, WireError) as problem:
            self._leave(self._connection.end_of(problem))

    def _leave(self, end: StreamEnd) -> None:
        """End the stream from this side."""
        if self._own_end is None:
            self._own_end = end
            self._cancel()

    def _cancel(self) -> None:
        if self._stream is not None:
            self._stream.cancel()

    # The client's thread.

    def _run(self) -> None:
        """Connect, and reconnect after each loss."""
        wait_s: float | None = 0.0
        while wait_s is not None and not self._stopping.wait(wait_s):
            problem = self._run_stream()
            if self.welcome is None and isinstance(problem, grpc.RpcError):
                problem = find_other_server(self.address) or problem
            with self._lock:
                wait_s, report = self._end_stream(problem)
            if wait_s is None:
                self._decided.set()
            if report is not None:
                self._notify([("on_lost", partial(self._on_lost, report))])

    def _run_stream(self) -> Exception | None:
        """Run one stream until its end; return the exception that ended it, None if the service ended it normally."""
        try:
            stream = self._open()
            with self._lock:
                self._stream, self._own_end = stream, None
                if self._is_closing:
                    return None
                self.transport = "socket" if isinstance(stream, SocketStream) else "grpc"
                self._protocol.connected(stream.send)
                self._watch()
            stream.pump(self._receive_unless_awaited)
            with self._lock:
                self._receive()
                return stream.failure
        except Exception as problem:  # A lack of descriptors or threads may be temporary.
            return problem

    def _open(self) -> Stream:
        """Open a stream. Raises UserError for files that have become unusable, and OSError without descriptors."""
        connection = self._connector.connect_steps(CONNECT_TIMEOUT_S)
        if connection is not None:
            return SocketStream(connection, self._connector.authorization(), self._poll_s)
        return GrpcStream(self._connector.open(CHANNEL_OPTIONS), self._connector.metadata())

    def _receive_unless_awaited(self) -> None:
        """Process responses, unless the engine's thread is waiting for them."""
        if self._is_waiting:
            return
        with self._lock:
            if self._is_waiting:
                return
            self._receive()
            self._watch()
            if self.lost is None:
                self._decided.set()
            news = self._take_news()
        self._notify(news)

    def _end_stream(self, problem: Exception | None) -> tuple[float | None, str | None]:
        """Record the end of a stream; return the result of `ConnectionState.ended`."""
        self.transport = ""
        if problem is not None and not isinstance(problem, EXPECTED_ENDS):
            logger.warning("the connection to the drafter failed", problem=type(problem).__name__)
        self._protocol.disconnected()
        wait_s, report = self._connection.ended(self._own_end or self._connection.end_of(problem))
        self._own_end = None
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        return wait_s, None if self._is_required or self._is_closing else report

    def _notify(self, news: Iterable[tuple[str, Callable[[], None]]]) -> None:
        """Call callbacks of the owner by name, and log their exceptions."""
        for name, callback in news:
            try:
                callback()
            except Exception as problem:
                logger.error(f"{name} raised", problem=type(problem).__name__)
