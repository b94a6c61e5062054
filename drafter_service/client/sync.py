"""The client for engines that call: a thread of its own keeps the connection, and no call waits past its deadline."""

from __future__ import annotations

import contextlib
import threading
import time
from queue import Empty, SimpleQueue
from types import TracebackType

import grpc
import numpy as np

from drafter_service.client.base import Client
from drafter_service.client.link import CLOSE_TIMEOUT_S, CONNECT_TIMEOUT_S, OPTIONS
from drafter_service.client.messages import RefusedError
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs import drafter_pb2_grpc
from drafter_service.wire import WireError
from ssd.draft import DraftBatch, Progress
from ssd.errors import UserError


class DrafterClient(Client):
    """A drafter behind a gRPC stream. One thread uses it. `on_lost` is called from another."""

    def _begin(self) -> None:
        self._lock = threading.Lock()
        """Held by whoever uses the core."""
        self._requests: SimpleQueue[pb.DraftRequest | None] = SimpleQueue()
        self._responses: SimpleQueue[tuple[grpc.Call, pb.DraftResponse] | None] = SimpleQueue()
        """With the stream that each came on; None only wakes whoever waits."""
        self._is_waiting = False
        """Whether the thread that drafts takes in responses: it has them sooner than through the other."""
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
        session: str | None = None,
        request: str | None = None,
        learn: bool = True,
    ) -> None:
        """Begin a sequence with its prompt, uint32 [P].

        session: turns of a conversation have the same one. request: a name to forget what it produces by. learn:
        whether anything of it may be learned, or drafted to others while it runs. Raises ValueError for an id in use, a
        token out of range and a name that is too long.
        """
        with self._lock:
            self._core.start(sequence_id, prompt, session=session, request=request, learn=learn)
            self._send()

    def draft(self, progress: Progress) -> DraftBatch:
        """Tell what was committed and wait for drafts, at most until the deadline.

        Raises ValueError as `Progress.check` does.
        """
        with self._lock:
            turn = self._core.draft(progress)
            self._is_waiting = True
            self._send()
            is_settled = self._core.is_settled(turn)
        until = time.monotonic() + self._deadline_s
        while not is_settled:
            try:
                arrived = self._responses.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                break
            with self._lock:
                self._take_in(arrived)
                is_settled = self._core.is_settled(turn)
        with self._lock:
            self._is_waiting = False
            self._take_in_all()
            self._mind_silence()
            return self._core.settle(turn)

    def finish(
        self, sequence_id: int, tokens: np.ndarray, *, verified: int = 0, accepted: int = 0, learn: bool = True
    ) -> None:
        """End a sequence; `tokens`, uint32 [n], were committed since its last draft. Raises ValueError as `draft`."""
        with self._lock:
            self._core.finish(sequence_id, tokens, verified=verified, accepted=accepted, learn=learn)
            self._send()

    def close(self) -> None:
        """Let the service take what was sent, then end the stream."""
        self._stopping.set()
        with self._lock:
            self._is_closing = True
            is_heard = self._core.dialogue.may_send
            self._core.say_goodbye()
            self._send()
            self._requests.put(None)
            if not is_heard:
                self._cancel()
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
        for request in self._core.dialogue.outgoing():
            self._requests.put(request)

    def _take_in_all(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._take_in(self._responses.get_nowait())

    def _take_in(self, arrived: tuple[grpc.Call, pb.DraftResponse] | None) -> None:
        if arrived is None or arrived[0] is not self._call or self._farewell is not None:
            return
        try:
            self._link.receive(arrived[1])
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
                self._take_in_all()
                wait_s, news = self._end(problem)
            self._responses.put(None)
            if wait_s is None:
                self._decided.set()
            if news is not None:
                self._on_lost(news)

    def _converse(self) -> Exception | None:
        """One stream from its beginning to its end; returns what ended it, None if the service did in good order."""
        requests: SimpleQueue[pb.DraftRequest | None] = SimpleQueue()
        try:
            with self._connector.open(OPTIONS) as channel:
                stub = drafter_pb2_grpc.DrafterServiceStub(channel)
                call = stub.Draft(iter(requests.get, None), metadata=self._connector.metadata())
                with self._lock:
                    if self._is_closing:
                        return None
                    self._requests = requests
                    self._greet(call)
                    self._send()
                for response in call:
                    self._responses.put((call, response))
                    if not self._is_waiting:
                        self._take_in_for_nobody()
        except (grpc.RpcError, UserError) as problem:
            return problem
        finally:
            requests.put(None)
        return None

    def _take_in_for_nobody(self) -> None:
        with self._lock:
            self._take_in_all()
            if self.lost is None:
                self._decided.set()
        if self._is_waiting:  # by now, for what may have been taken in here
            self._responses.put(None)
