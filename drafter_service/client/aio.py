"""The client for engines that live in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Protocol

import grpc
import numpy as np

from drafter_service.client.base import Client
from drafter_service.client.link import CLOSE_TIMEOUT_S, CONNECT_TIMEOUT_S, OPTIONS
from drafter_service.client.socket_call import SocketCall
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs import drafter_pb2_grpc
from ssd.types import DraftBatch, Progress


class Call(Protocol):
    """A Draft stream that is open: that of gRPC, or a `SocketCall`."""

    async def read(self) -> Any:
        """The next response, or EOF. Raises grpc.RpcError."""

    async def write(self, request: pb.DraftRequest) -> None:
        """Send. Raises grpc.RpcError."""

    async def done_writing(self) -> None:
        """Nothing more will be sent."""

    def cancel(self) -> object:
        """Break it off."""


class AsyncDrafterClient(Client):
    """A drafter behind a gRPC stream, for use within `async with`. Calls take turns.

    The constructor does not connect yet; `required` is seen to on entering.
    """

    def _begin(self) -> None:
        self._changed = asyncio.Event()
        """Something came that somebody may wait for."""
        self._has_more = asyncio.Event()
        """Something is to be sent."""
        self._turns = asyncio.Lock()
        self._keeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AsyncDrafterClient:
        self._keeping = asyncio.create_task(self._run(), name="ssd-client")
        if self._is_required:
            await self._await_welcome()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(
        self,
        sequence_id: int,
        prompt: np.ndarray,
        *,
        session_id: str | None = None,
        request_id: str | None = None,
        learn: bool = True,
    ) -> None:
        """Begin a sequence, as `DrafterClient.start`."""
        self._check_process()
        async with self._turns:
            self._core.start(sequence_id, prompt, session_id=session_id, request_id=request_id, learn=learn)
            self._has_more.set()

    async def draft(self, progress: Progress) -> DraftBatch:
        """Tell what was committed and wait for drafts, as `DrafterClient.draft`."""
        self._check_process()
        async with self._turns:
            turn = self._core.draft(progress)
            self._has_more.set()
            try:
                await self._wait_until(lambda: self._core.is_settled(turn), self._deadline_s)
            finally:  # The caller may give up waiting; the turn is over all the same.
                drafts = self._core.settle(turn)
            self._mind_silence()
            return drafts

    async def finish(
        self, sequence_id: int, tokens: np.ndarray, *, verified: int = 0, accepted: int = 0, learn: bool = True
    ) -> None:
        """End a sequence, as `DrafterClient.finish`."""
        self._check_process()
        async with self._turns:
            self._core.finish(sequence_id, tokens, verified=verified, accepted=accepted, learn=learn)
            self._has_more.set()

    async def close(self) -> None:
        """Let the service take what was sent, then end the stream."""
        if self._keeping is None or self._is_fork:
            return
        self._is_closing = True
        is_heard = self._core.dialogue.may_send
        self._core.say_goodbye()
        self._has_more.set()
        if is_heard:
            await asyncio.wait([self._keeping], timeout=CLOSE_TIMEOUT_S)
        self._keeping.cancel()
        await asyncio.wait([self._keeping])

    async def _await_welcome(self) -> None:
        await self._wait_until(lambda: self._link.is_decided, CONNECT_TIMEOUT_S)
        self._is_required = False
        if self.lost is not None:
            failure = self._link.failure(self.address)
            await self.close()
            raise failure

    async def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until something is so, at most for a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()

    async def _run(self) -> None:
        """Connect, again and again. A task of its own."""
        wait_s: float | None = 0.0
        while wait_s is not None:
            await asyncio.sleep(wait_s)
            wait_s, news = self._end(await self._converse())
            self._changed.set()
            if self._is_closing:
                return
            if news is not None:
                self._tell_owner(news)

    async def _converse(self) -> Exception | None:
        """One stream from its beginning to its end; returns what ended it, None if the service did in good order."""
        try:
            async with self._open() as call:
                self._greet(call, "socket" if isinstance(call, SocketCall) else "grpc")
                self._has_more.set()
                writer = asyncio.create_task(self._write(call), name="ssd-client-writer")
                try:
                    while (response := await call.read()) is not grpc.aio.EOF:
                        self._link.receive(response)
                        self._has_more.set()
                        self._changed.set()
                finally:
                    writer.cancel()
        except Exception as problem:  # Beside what is expected, such as too few descriptors: that may pass.
            return problem
        except asyncio.CancelledError:
            # A call that this client cancels looks as if the task were cancelled.
            if self._farewell is None:
                raise
        return None

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Call]:
        """A stream. Raises UserError for files that cannot be used any more."""
        steps = await self._call_steps()
        if steps is not None:
            async with steps:
                yield steps
        else:
            async with self._connector.open_aio(OPTIONS) as channel:
                yield drafter_pb2_grpc.DrafterServiceStub(channel).Draft(metadata=self._connector.metadata())

    async def _call_steps(self) -> SocketCall | None:
        """A stream over the socket for steps; None if nobody answers there. Raises OSError for want of descriptors."""
        path = self._connector.steps_path
        try:
            return None if path is None else await SocketCall.open(path, self._connector.authorization())
        except OSError as problem:
            if problem.errno in (errno.EMFILE, errno.ENFILE):
                raise
        return None

    async def _write(self, call: Call) -> None:
        """Send whatever is to be sent. A task for each stream; if that breaks its reader finds out why."""
        try:
            while not self._is_closing or self._has_more.is_set():
                await self._has_more.wait()
                self._has_more.clear()
                for message in self._core.dialogue.outgoing():
                    await call.write(message.message())
            await call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass
        except Exception as problem:  # Of which the reader would never hear.
            self._leave(self._link.parting_of(problem))
