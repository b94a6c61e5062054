"""The stream over the step socket in an event loop, with the methods of a call of `grpc.aio`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc

from drafter_service.client.socket_status import broken, read_end, read_response
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.frames import HEADER, MAGIC, framed, read_header


class SocketCall:
    """A Draft stream over a connection. For use within `async with`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, path: Path, authorization: str) -> SocketCall:
        """Raises OSError if nobody answers."""
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(MAGIC + framed(authorization.encode()))
        return cls(reader, writer)

    async def __aenter__(self) -> SocketCall:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def read(self) -> Any:
        """The next response, or EOF once the stream has ended in good order. Raises grpc.RpcError and WireError."""
        try:
            size, is_last = read_header(await self._reader.readexactly(HEADER.size))
            body = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError) as problem:
            raise broken(problem) from None
        if not is_last:
            return read_response(body)
        if failure := read_end(body):
            raise failure
        return grpc.aio.EOF

    async def write(self, request: pb.DraftRequest) -> None:
        """Send. Raises grpc.RpcError for a connection that broke."""
        self._writer.write(framed(request.SerializeToString()))
        try:
            await self._writer.drain()
        except OSError as problem:
            raise broken(problem) from None

    async def done_writing(self) -> None:
        """Nothing more will be sent."""
        if not self._writer.is_closing():
            self._writer.write_eof()

    def cancel(self) -> None:
        """Hang up."""
        self._writer.transport.abort()
