"""Draft streams over a Unix socket beside that of gRPC, for engines on the same machine (see `frames`)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import NoReturn

import grpc

from drafter_service.address import Address
from drafter_service.drafting import Drafting
from drafter_service.frames import HEADER, MAGIC, framed, last_frame, read_header
from drafter_service.wire import WireError

GREETING_S = 5.0
"""How long one who connects may take to say who they are."""
BACKLOG = 1024
MAX_AUTHORIZATION_BYTES = 8 << 10
"""As much metadata as gRPC lets in."""


class StepSocket:
    """Serves Draft streams at one Unix socket. The event loop alone uses it."""

    def __init__(self, drafting: Drafting, most: int) -> None:
        """`most`: connections at a time."""
        self._drafting = drafting
        self._most = most
        self._streams: set[asyncio.Task[object]] = set()
        self._address: Address | None = None
        self._server: asyncio.Server | None = None

    async def start(self, address: Address, mode: int) -> None:
        """Listen; the socket's file has this mode. Raises UserError for an address that is not to be had."""
        address.claim()
        listening = socket.socket(socket.AF_UNIX)
        with address.permissions(mode):
            listening.bind(str(address.socket_path))
        self._address = address
        self._server = await asyncio.start_unix_server(self._serve, sock=listening, backlog=BACKLOG)

    async def stop(self, grace_s: float) -> None:
        """Let nobody in any more; streams have a while to end."""
        if self._server is None or self._address is None or self._address.socket_path is None:
            return
        self._server.close()
        self._address.socket_path.unlink(missing_ok=True)
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
            async with aclosing(self._drafting.draft(_requests(reader), context)) as responses:
                async for response in responses:
                    writer.write(framed(response.SerializeToString()))
                    await writer.drain()
        except EndedError as ended:
            return ended
        except WireError as problem:
            return EndedError(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        return EndedError(grpc.StatusCode.OK, "")


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


async def _requests(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The messages of a stream until its end. Raises WireError for one that is too long."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            size, _ = read_header(await reader.readexactly(HEADER.size))
            yield await reader.readexactly(size)
