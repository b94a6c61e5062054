"""The client for engines that call: a thread of its own keeps the connection, and no call waits past its deadline."""

from __future__ import annotations

import threading
import time
from types import TracebackType

import numpy as np

from drafter_service.client.base import Client
from drafter_service.client.core import Turn
from drafter_service.client.grpc_stream import GrpcStream
from drafter_service.client.link import CLOSE_TIMEOUT_S, CONNECT_TIMEOUT_S, OPTIONS
from drafter_service.client.messages import RefusedError
from drafter_service.client.socket_stream import SocketStream
from drafter_service.client.stream import Stream
from drafter_service.transport.wire import WireError
from ssd.types import DraftBatch, Progress


class DrafterClient(Client):
    """A drafter behind a stream. One thread uses it. `on_lost` is called from another."""

    def _begin(self) -> None:
        self._lock = threading.Lock()
        """Held by whoever uses the core."""
        self._stream: Stream | None = None
        self._is_waiting = False
        """Whether the thread that drafts takes in responses."""
        self._decided = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ssd-client", daemon=True)
        self._thread.start()
        if self._is_required:
            self._await_welcome()

    def start(
        self,
        sequence_id: int,
        prompt: np.ndarray,
        *,
        session_id: str | None = None,
        request_id: str | None = None,
        learn: bool = True,
    ) -> None:
        """Begin a sequence with its prompt, uint32 [P].

        session_id: turns of a conversation have the same one. request_id: a name to forget what it produces by. learn:
        whether anything of it may be learned, or drafted to others while it runs. Raises ValueError for an id in use, a
        token out of range and a name that is too long.
        """
        self._check_process()
        self._check_is_answered()
        with self._lock:
            self._core.start(sequence_id, prompt, session_id=session_id, request_id=request_id, learn=learn)
            self._send()
            self._watch()

    def draft(self, progress: Progress) -> DraftBatch:
        """Tell what was committed and wait for drafts, at most until the deadline.

        Raises ValueError as `Progress.check` does.
        """
        return self.ask(progress).result()

    def ask(self, progress: Progress) -> Answer:
        """`draft`, but for the waiting: take the answer's result before you call anything else here."""
        self._check_process()
        self._check_is_answered()
        with self._lock:
            turn = self._core.draft(progress)
            self._is_waiting = True
            self._send()
            return Answer(self, turn, self._stream)

    def _settle(self, turn: Turn, stream: Stream | None) -> DraftBatch:
        # Where the engine's own threads take every core, the service gets to work when the engine waits.
        until = time.monotonic() + self._deadline_s
        is_settled = self._core.is_settled(turn)
        try:
            while stream is not None and not is_settled and stream.wait(until - time.monotonic()):
                with self._lock:
                    self._take_in()
                    is_settled = self._core.is_settled(turn)
        finally:  # Whatever interrupts the waiting, it is over.
            with self._lock:
                self._is_waiting = False
                self._take_in()
                self._mind_silence()
                drafts = self._core.settle(turn)
                self._watch()
        return drafts

    def _check_is_answered(self) -> None:
        if self._is_waiting:
            raise ValueError("take the result of what was asked before the next call")

    def finish(self, sequence_id: int, tokens: np.ndarray, *, verified: int = 0, learn: bool = True) -> None:
        """End a sequence; `tokens`, uint32 [n], were committed since its last draft. Raises ValueError as `draft`."""
        self._check_process()
        self._check_is_answered()
        with self._lock:
            self._core.finish(sequence_id, tokens, verified=verified, learn=learn)
            self._send()
            self._watch()

    def close(self) -> None:
        """Let the service take what was sent, then end the stream. May be called by `on_lost`.

        In a fork of the process that connected it lets go of the connection and nothing else.
        """
        if self._is_fork:
            if self._stream is not None:
                self._stream.abandon()
            return
        self._stopping.set()
        with self._lock:
            self._is_closing = True
            is_heard = self._core.dialogue.may_send
            self._core.say_goodbye()
            self._send()
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

    def _await_welcome(self) -> None:
        self._decided.wait(CONNECT_TIMEOUT_S)
        with self._lock:
            self._is_required = False
            failure = None if self.lost is None else self._link.failure(self.address)
        if failure is not None:
            self.close()
            raise failure

    def _send(self) -> None:
        if self._stream is not None and (messages := self._core.dialogue.outgoing()):
            self._stream.send(messages)

    def _watch(self) -> None:
        """The thread that waits for drafts leaves: what is still to come is the other's."""
        if self._stream is not None and self._core.dialogue.is_owed:
            self._stream.watch()

    def _take_in(self) -> None:
        try:
            for response in [] if self._stream is None else self._stream.receive():
                if self._farewell is None:
                    self._link.receive(response)
            self._send()
        except (RefusedError, WireError) as problem:
            self._leave(self._link.parting_of(problem))

    # The other thread.

    def _run(self) -> None:
        """Connect, again and again."""
        wait_s: float | None = 0.0
        while wait_s is not None and not self._stopping.wait(wait_s):
            problem = self._converse()
            with self._lock:
                wait_s, news = self._end(problem)
                if self._stream is not None:
                    self._stream.close()
                    self._stream = None
            if wait_s is None:
                self._decided.set()
            if news is not None:
                self._tell_owner(news)

    def _converse(self) -> Exception | None:
        """One stream from its beginning to its end; returns what ended it, None if the service did in good order."""
        try:
            stream = self._open()
            with self._lock:
                self._stream = stream
                if self._is_closing:
                    return None
                self._greet(stream, "socket" if isinstance(stream, SocketStream) else "grpc")
                self._send()
                self._watch()
            stream.pump(self._take_in_for_nobody)
            with self._lock:
                self._take_in()
                return stream.failure
        except Exception as problem:  # Such as too few descriptors or threads: that may pass.
            return problem

    def _open(self) -> Stream:
        """Raises UserError for files that cannot be used any more, and OSError for want of descriptors."""
        connection = self._connector.connect_steps(CONNECT_TIMEOUT_S)
        if connection is not None:
            return SocketStream(connection, self._connector.authorization())
        return GrpcStream(self._connector.open(OPTIONS), self._connector.metadata())

    def _take_in_for_nobody(self) -> None:
        if self._is_waiting:
            return
        with self._lock:
            if self._is_waiting:
                return
            self._take_in()
            self._watch()
            if self.lost is None:
                self._decided.set()


class Answer:
    """Drafts on their way."""

    def __init__(self, client: DrafterClient, turn: Turn, stream: Stream | None) -> None:
        self._client = client
        self._turn = turn
        self._stream = stream

    def result(self) -> DraftBatch:
        """Wait for the drafts, at most until the deadline, then take those at hand. To be called once."""
        return self._client._settle(self._turn, self._stream)
