"""Draft streams over a second Unix socket without gRPC, for engines on the same machine (see `frames`).

A task serves each connection. While it waits for the next request, a small request is answered by the protocol that
receives it, since waking the task would take longer than reading the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import NoReturn, Protocol

import grpc

from drafter_service.auth.callers import Context
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.address import Address
from drafter_service.transport.frames import HEADER, MAGIC, framed, last_frame, read_header
from drafter_service.transport.wire import WireError
from ssd.corpus.memory import trim_heap

AUTHORIZATION_TIMEOUT_S = 5.0
"""Time within which a new connection must send its authorization."""
BACKLOG = 128
"""Length of the queue of connections; without free descriptors asyncio makes and logs this many attempts to accept."""
READ_BYTES = 64 << 10
"""Maximum number of bytes per read. By default asyncio allocates 256 KiB for every read, which takes 15 us."""
LARGE_BYTES = 2 << 20
"""Minimum size of a large frame, in bytes; only a few of them are received at a time."""
MAX_LARGE_FRAMES = 4
"""Maximum number of large frames in transfer: each takes up to 64 MiB until it is complete."""
LARGE_TIMEOUT_S = 30.0
"""Time within which a large frame must arrive."""
TRIMMED_BYTES = 16 << 20
"""Minimum size of frames whose memory is returned to the system, which takes milliseconds."""
MAX_AUTHORIZATION_BYTES = 8 << 10
"""Maximum size of the authorization: that of gRPC's metadata."""


Send = Callable[[pb.DraftResponse], None]
Answer = Callable[[bytes, Send], None]
"""Answers a serialized request: sends the response first, then does what need not precede it. An exception ends the
stream."""


class Streams(Protocol):
    """Answers Draft streams."""

    def draft(
        self, requests: AsyncIterator[bytes], context: Context, on_open: Callable[[Answer], None]
    ) -> AsyncGenerator[pb.DraftResponse, None]:
        """Serve one stream. `on_open` is called once, with a function that may answer requests after the first."""


class Connection(asyncio.StreamReaderProtocol, asyncio.BufferedProtocol):
    """Passes received bytes to the task of the connection, or answers a request without the task."""

    def __init__(self, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
        """`serve` is run in a task once the connection is made."""
        self.reader = asyncio.StreamReader()
        super().__init__(self.reader, serve)
        self._received = bytearray(READ_BYTES)
        self.task: asyncio.Task[object] | None = None
        self.answer: Answer | None = None
        """None until requests may be answered without the task."""
        self.unanswered_bytes = 0
        """Number of bytes of requests that were passed to the task and not answered yet."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        super().connection_made(transport)

    def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002
        """See `asyncio.BufferedProtocol`."""
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        data = bytes(memoryview(self._received)[:nbytes])
        if self.answer is None or not self._is_one_request(data) or not self._is_idle:
            self.unanswered_bytes += nbytes
            self.data_received(data)
            return
        try:
            self.answer(data[HEADER.size :], self._send)
        except Exception as problem:  # The task handles it as if it had answered the request itself.
            self.reader.set_exception(problem)

    def _send(self, response: pb.DraftResponse) -> None:
        self._transport.write(framed(response.SerializeToString()))

    @property
    def _is_idle(self) -> bool:
        """Whether the task waits for the next request, and all responses have been sent."""
        assert self.task is not None
        return (
            not self.unanswered_bytes
            and not self._transport.get_write_buffer_size()
            and not self.task.cancelling()
            and not self.task.done()
        )

    @staticmethod
    def _is_one_request(data: bytes) -> bool:
        return len(data) >= HEADER.size and HEADER.unpack_from(data)[0] == len(data) - HEADER.size


class StepSocket:
    """Serves Draft streams at one Unix socket. Used by the event loop alone."""

    def __init__(self, streams: Streams, max_connections: int) -> None:
        self._streams = streams
        self._max_connections = max_connections
        self._connections: set[asyncio.Task[object]] = set()
        self._large = asyncio.Semaphore(MAX_LARGE_FRAMES)
        self._listening: socket.socket | None = None
        self._path: Path | None = None
        self._server: asyncio.Server | None = None

    def bind(self, address: Address, mode: int) -> None:
        """Listen at an address, with this file mode. Raises UserError for an address that cannot be used.

        Call it before gRPC listens: a client that finds the gRPC socket without this one uses gRPC.
        """
        address.claim()
        self._listening = socket.socket(socket.AF_UNIX)
        with address.permissions(mode):
            self._listening.bind(str(address.socket_path))
        self._path = address.socket_path
        self._listening.listen(BACKLOG)

    async def start(self) -> None:
        """Accept connections, if there is a socket."""
        if self._listening is not None:
            self._server = await asyncio.get_running_loop().create_unix_server(
                lambda: Connection(self._serve), sock=self._listening, backlog=BACKLOG
            )

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections, and cancel streams that have not ended after `grace_s` seconds."""
        if self._server is not None:
            self._server.close()
        elif self._listening is not None:
            self._listening.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._connections:
            _, late = await asyncio.wait(self._connections, timeout=grace_s)
            for task in late:
                task.cancel()

    async def _serve(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until its end."""
        task = asyncio.current_task()
        assert task is not None, "the server makes a task of each connection"
        self._connections.add(task)
        connection = writer.transport.get_protocol()
        assert isinstance(connection, Connection)
        connection.task = task
        try:
            ended = await self._answer(connection, writer)
            writer.write(last_frame(ended.code.value[0], ended.reason))
            await writer.drain()
        except (OSError, asyncio.CancelledError):
            pass  # The client has disconnected, or the service is stopping.
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, connection: Connection, writer: asyncio.StreamWriter) -> StreamEndedError:
        """Answer all requests of a stream; returns its status."""
        try:
            if len(self._connections) > self._max_connections:
                reason = f"the service has its {self._max_connections} streams already"
                raise StreamEndedError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
            context = await _read_authorization(connection.reader)
            connection.unanswered_bytes -= context.nbytes

            def answer_directly(answer: Answer) -> None:
                connection.answer = answer

            requests = self._requests(connection)
            async with aclosing(self._streams.draft(requests, context, answer_directly)) as responses:
                async for response in responses:
                    writer.write(framed(response.SerializeToString()))
                    await writer.drain()
        except StreamEndedError as ended:
            return ended
        except WireError as problem:
            return StreamEndedError(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        return StreamEndedError(grpc.StatusCode.OK, "")

    async def _requests(self, connection: Connection) -> AsyncIterator[bytes]:
        """Yield the requests of a stream. Raises WireError for one that is too long, or takes too long."""
        reader = connection.reader
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size, _ = read_header(await reader.readexactly(HEADER.size))
                if size < LARGE_BYTES:
                    yield await reader.readexactly(size)
                else:
                    async with self._large:
                        large = await _read_large_frame(reader, size)
                    yield large
                    del large
                    if size >= TRIMMED_BYTES:
                        trim_heap()
                connection.unanswered_bytes -= HEADER.size + size


async def _read_large_frame(reader: asyncio.StreamReader, size: int) -> bytes:
    try:
        async with asyncio.timeout(LARGE_TIMEOUT_S):
            return await reader.readexactly(size)
    except TimeoutError:
        raise WireError(f"a frame of {size} bytes did not arrive within {LARGE_TIMEOUT_S:.0f} s") from None


class StreamEndedError(Exception):
    """A stream has ended, with a status code and its reason."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class SocketContext:
    """The context of a stream for access control: at most a bearer token."""

    def __init__(self, authorization: str) -> None:
        self.nbytes = len(MAGIC) + HEADER.size + len(authorization)
        """Number of bytes at the start of the stream up to and including the authorization."""
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


async def _read_authorization(reader: asyncio.StreamReader) -> SocketContext:
    """Read the beginning of a stream. Raises StreamEndedError if it is something else, or takes too long."""
    try:
        async with asyncio.timeout(AUTHORIZATION_TIMEOUT_S):
            if await reader.readexactly(len(MAGIC)) != MAGIC:
                raise StreamEndedError(grpc.StatusCode.UNIMPLEMENTED, "this socket serves only ssd.drafter.v1 frames")
            size, _ = read_header(await reader.readexactly(HEADER.size))
            if size > MAX_AUTHORIZATION_BYTES:
                raise StreamEndedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "the authorization is too long")
            return SocketContext((await reader.readexactly(size)).decode("latin1"))
    except TimeoutError:
        raise StreamEndedError(grpc.StatusCode.DEADLINE_EXCEEDED, "the authorization did not arrive in time") from None
    except asyncio.IncompleteReadError:
        raise StreamEndedError(grpc.StatusCode.CANCELLED, "the client closed the connection") from None
