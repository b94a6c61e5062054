"""Draft streams over a Unix socket beside that of gRPC, for engines on the same machine (see `frames`)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import NoReturn

import grpc

from drafter_service.server.stream import Drafting
from drafter_service.transport.address import Address
from drafter_service.transport.frames import HEADER, MAGIC, framed, last_frame, read_header
from drafter_service.transport.wire import WireError
from ssd.corpus.memory import trim_heap

GREETING_S = 5.0
"""How long one who connects may take to say who they are."""
BACKLOG = 128
"""Also how often asyncio tries, and says that it failed, when the process has no file left to open."""
LARGE_BYTES = 2 << 20
LARGE_AT_ONCE = 4
"""Larger messages that may be on their way at a time: they take up to 64 MiB each until they are whole."""
LARGE_S = 30.0
"""How long each may take."""
TRIMMED_BYTES = 16 << 20
"""After so large a message its memory goes back to the system, which takes milliseconds."""
MAX_AUTHORIZATION_BYTES = 8 << 10
"""As much metadata as gRPC lets in."""


class StepSocket:
    """Serves Draft streams at one Unix socket. The event loop alone uses it."""

    def __init__(self, drafting: Drafting, most: int) -> None:
        """`most`: connections at a time."""
        self._drafting = drafting
        self._most = most
        self._streams: set[asyncio.Task[object]] = set()
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)
        self._listening: socket.socket | None = None
        self._path: Path | None = None
        self._server: asyncio.Server | None = None

    def bind(self, address: Address, mode: int) -> None:
        """Have connections wait; the socket's file has this mode. Raises UserError for an address that cannot be had.

        To be called before gRPC listens: who finds gRPC's socket and not this one goes on without this one.
        """
        address.claim()
        self._listening = socket.socket(socket.AF_UNIX)
        with address.permissions(mode):
            self._listening.bind(str(address.socket_path))
        self._path = address.socket_path
        self._listening.listen(BACKLOG)

    async def start(self) -> None:
        """Serve whoever connects, if there is a socket."""
        if self._listening is not None:
            self._server = await asyncio.start_unix_server(self._serve, sock=self._listening, backlog=BACKLOG)

    async def stop(self, grace_s: float) -> None:
        """Let nobody in any more; streams have a while to end."""
        if self._server is not None:
            self._server.close()
        elif self._listening is not None:
            self._listening.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._streams:
            _, late = await asyncio.wait(self._streams, timeout=grace_s)
            for task in late:
                task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its beginning to its end."""
        task = asyncio.current_task()
        assert task is not None, "the server makes a task of each connection"
        self._streams.add(task)
        try:
            ended = await self._converse(reader, writer)
            writer.write(last_frame(ended.code.value[0], ended.reason))
            await writer.drain()
        except (OSError, asyncio.CancelledError):
            pass  # Nobody is there any more, or the service stops and waits no longer.
        finally:
            self._streams.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> EndedError:
        """Answer until there is nothing more to answer; returns why."""
        try:
            if len(self._streams) > self._most:
                raise EndedError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, f"the service has its {self._most} streams already"
                )
            context = await _read_greeting(reader)
            async with aclosing(self._drafting.draft(self._requests(reader), context)) as responses:
                async for response in responses:
                    writer.write(framed(response.SerializeToString()))
                    await writer.drain()
        except EndedError as ended:
            return ended
        except WireError as problem:
            return EndedError(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        return EndedError(grpc.StatusCode.OK, "")

    async def _requests(self, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        """The messages of a stream until its end. Raises WireError for one that is too long, or takes too long."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size, _ = read_header(await reader.readexactly(HEADER.size))
                if size < LARGE_BYTES:
                    yield await reader.readexactly(size)
                    continue
                async with self._large:
                    large = await _large_frame(reader, size)
                yield large
                del large
                if size >= TRIMMED_BYTES:
                    trim_heap()


async def _large_frame(reader: asyncio.StreamReader, size: int) -> bytes:
    try:
        async with asyncio.timeout(LARGE_S):
            return await reader.readexactly(size)
    except TimeoutError:
        raise WireError(f"a frame of {size} bytes did not come within {LARGE_S:.0f} s") from None


class EndedError(Exception):
    """A stream is over, with a status and its reason."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class SocketContext:
    """What a stream says of its caller. On a Unix socket that is a token or nothing."""

    def __init__(self, authorization: str) -> None:
        self._metadata = (("authorization", authorization),) if authorization else ()

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        """As gRPC gives it."""
        return self._metadata

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """Nothing: there are no certificates here."""
        return {}

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """End the stream. Raises EndedError."""
        raise EndedError(code, details)


async def _read_greeting(reader: asyncio.StreamReader) -> SocketContext:
    """Raises EndedError for one who says something else, or nothing for too long."""
    try:
        async with asyncio.timeout(GREETING_S):
            if await reader.readexactly(len(MAGIC)) != MAGIC:
                raise EndedError(grpc.StatusCode.UNIMPLEMENTED, "this socket speaks frames of ssd.drafter.v1 alone")
            size, _ = read_header(await reader.readexactly(HEADER.size))
            if size > MAX_AUTHORIZATION_BYTES:
                raise EndedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "the authorization is too long")
            return SocketContext((await reader.readexactly(size)).decode("latin1"))
    except TimeoutError:
        raise EndedError(grpc.StatusCode.DEADLINE_EXCEEDED, "nothing was said for too long") from None
    except asyncio.IncompleteReadError:
        raise EndedError(grpc.StatusCode.CANCELLED, "the caller has left") from None
