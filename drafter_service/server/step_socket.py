"""Draft streams over a second Unix socket without gRPC, for engines on the same machine (see `wire`, frames).

A task serves each connection. It sleeps while the protocol that receives requests answers them, since waking the task
would take longer than reading a request; it only awaits answers that are not ready at once.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import grpc

from drafter_service.server.stream import Later, OpenStream, Streams
from drafter_service.transport.address import Address
from drafter_service.transport.wire import MAGIC, Frames, WireError, framed, last_frame

AUTHORIZATION_TIMEOUT_S = 30.0
"""Time within which a new connection must send its authorization. An engine that loads a model may stop for seconds."""
BACKLOG = 128
"""Length of the queue of connections that are not accepted yet."""
READ_BYTES = 64 << 10
"""Maximum number of bytes per read. By default asyncio allocates 256 KiB for every read, which takes 15 us."""
MAX_AUTHORIZATION_BYTES = 8 << 10
"""Maximum size of the authorization: that of gRPC's metadata."""


class StepSocket:
    """Serves Draft streams at one Unix socket. Used by the event loop alone."""

    def __init__(self, streams: Streams, max_connections: int) -> None:
        self._streams = streams
        self._max_connections = max_connections
        self._connections: set[asyncio.Task[None]] = set()
        """Tasks of the connections."""
        self._path: Path | None = None
        self._server: asyncio.Server | None = None

    async def start(self, address: Address, mode: int) -> None:
        """Listen at an address, with this file mode. Raises UserError for an address that cannot be used.

        Call it before gRPC answers: a client that finds the gRPC socket without this one uses gRPC.
        """
        address.claim()
        listening = socket.socket(socket.AF_UNIX)
        with address.permissions(mode):
            listening.bind(str(address.socket_path))
        self._path = address.socket_path
        # Without free descriptors asyncio makes, logs and repeats as many attempts to accept as its `backlog`, and each
        # repetition multiplies them.
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: Connection(self._serve), sock=listening, backlog=1
        )
        listening.listen(BACKLOG)

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections, and cancel streams that have not ended after `grace_s` seconds."""
        if self._server is not None:
            self._server.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._connections:
            _, late = await asyncio.wait(self._connections, timeout=grace_s)
            for task in late:
                task.cancel()

    def _serve(self, connection: Connection) -> asyncio.Task[None]:
        """Start the task of a connection. Raises StreamEndedError if there are too many."""
        if len(self._connections) >= self._max_connections:
            reason = f"the service has its {self._max_connections} streams already"
            raise StreamEndedError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        task = asyncio.create_task(connection.run(self._streams))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        return task


class Connection(asyncio.BufferedProtocol):
    """One connection, and its task."""

    def __init__(self, serve: Callable[[Connection], asyncio.Task[None]]) -> None:
        """serve: starts the task once the connection is made."""
        self._serve = serve
        self._buffer = bytearray(READ_BYTES)
        self._magic = MAGIC
        """Bytes of `MAGIC` that have not arrived."""
        self._frames = Frames(MAX_AUTHORIZATION_BYTES)
        self._requests: deque[bytes] = deque()
        """Requests that are not answered yet; the first frame is the authorization."""
        self._task: asyncio.Task[None] | None = None
        self._stream: OpenStream | None = None
        self._later: Later | None = None
        """The answer that the task waits for next."""
        self._failure: StreamEndedError | None = None
        """A violation of the protocol after `_requests`."""
        self._wake: asyncio.Future[None] | None = None
        """Ends the sleep of the task; None if it does not sleep."""
        self._is_at_end = False
        """Whether the client has sent the end of its requests."""
        self._is_full = False
        """Whether the client does not read its responses."""

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        try:
            self._task = self._serve(self)
        except StreamEndedError as refused:
            self._end(refused.code, refused.reason)

    def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002
        """See `asyncio.BufferedProtocol`."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        self._receive(bytes(memoryview(self._buffer)[:nbytes]))
        self._continue()
        if self._requests:
            self._transport.pause_reading()  # Until `_answer_ready` has answered these.

    def eof_received(self) -> bool:
        """See `asyncio.BufferedProtocol`."""
        self._is_at_end = True
        self._continue()
        return True  # The responses are still sent.

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._is_full = True

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._is_full = False
        self._continue()

    def connection_lost(self, _problem: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        if self._task is not None:
            self._task.cancel()

    # The task.

    async def run(self, streams: Streams) -> None:
        """Serve the stream until its end."""
        try:
            with suppress(asyncio.CancelledError):  # The client has disconnected, or the service is stopping.
                context = await self._authorization()
                async with streams.open(context) as self._stream:
                    while True:
                        later = self._later or self._answer_ready()
                        if later is not None:
                            self._later = None
                            self._send(await later)
                        elif self._is_at_end and not self._requests:
                            break
                        else:
                            await self._sleep()
                self._end(grpc.StatusCode.OK)
        except StreamEndedError as ended:
            self._end(ended.code, ended.reason)
        finally:
            if self._later is not None:
                self._later.close()
            self._transport.close()

    async def _authorization(self) -> SocketContext:
        """Return the beginning of the stream. Raises StreamEndedError if it is something else, or takes too long."""
        try:
            async with asyncio.timeout(AUTHORIZATION_TIMEOUT_S):
                while not self._requests:
                    if self._failure is not None:
                        raise self._failure
                    if self._is_at_end:
                        raise StreamEndedError(grpc.StatusCode.CANCELLED, "the client closed the connection")
                    await self._sleep()
        except TimeoutError:
            if not self._requests:  # Otherwise it has arrived while the event loop itself was late.
                reason = "the authorization did not arrive in time"
                raise StreamEndedError(grpc.StatusCode.DEADLINE_EXCEEDED, reason) from None
        return SocketContext(self._requests.popleft().decode("latin1"))

    async def _sleep(self) -> None:
        """Wait until the task has something to do."""
        self._wake = asyncio.get_running_loop().create_future()
        try:
            await self._wake
        finally:
            self._wake = None

    # Both.

    def _receive(self, data: bytes) -> None:
        """Add received bytes to the requests."""
        begin, self._magic = self._magic[: len(data)], self._magic[len(data) :]
        if not data.startswith(begin):
            reason = "this socket serves only ssd.drafter.v1 frames"
            self._failure = StreamEndedError(grpc.StatusCode.UNIMPLEMENTED, reason)
            return
        try:
            self._requests += [body for body, _ in self._frames.feed(data[len(begin) :])]
        except WireError as problem:
            self._failure = StreamEndedError(grpc.StatusCode.INVALID_ARGUMENT, str(problem))

    def _continue(self) -> None:
        """Answer requests if the task sleeps, and wake it for what it has to do itself."""
        if self._wake is None or self._wake.done():
            return
        try:
            if self._stream is not None:
                self._later = self._answer_ready()
        except Exception as problem:  # The task handles it as if it had answered the request itself.
            self._wake.set_exception(problem)
        else:
            if self._stream is None or self._later is not None or self._is_at_end:
                self._wake.set_result(None)

    def _answer_ready(self) -> Later | None:
        """Answer requests, in order, up to one whose answer has to be awaited; return that answer."""
        assert self._stream is not None
        while self._requests and not self._is_full:
            response = self._stream.answer(self._requests.popleft())
            if not isinstance(response, bytes):
                return response
            self._send(response)
        if not self._requests:
            if self._failure is not None:
                raise self._failure
            if not self._transport.is_reading():
                self._transport.resume_reading()
        return None

    def _send(self, response: bytes) -> None:
        assert self._stream is not None
        self._transport.write(framed(response))
        self._stream.sent()

    def _end(self, code: grpc.StatusCode, reason: str = "") -> None:
        """Send the end of the stream, with its status."""
        self._transport.write(last_frame(code.value[0], reason))
        self._transport.close()


class StreamEndedError(Exception):
    """A stream has ended, with a status code and its reason."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class SocketContext:
    """The context of a stream for access control: at most a bearer token."""

    def __init__(self, authorization: str) -> None:
        self._metadata = (("authorization", authorization),) if authorization else ()

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        """Return the metadata in gRPC's form."""
        return self._metadata

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """Return an empty mapping: there are no certificates here."""
        return {}

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """End the stream. Raises StreamEndedError."""
        raise StreamEndedError(code, details)
