"""A router that sends requests to engines in turn: `python -m benchmarks.cluster.router PORT ENGINE_PORT...`.

A request is sent to another engine if one refuses the connection, or closes it before the first byte of its response.
Engines are on this machine. Each connection carries one request with a `Content-Length`.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress

HOST = "127.0.0.1"
MAX_CHUNK = 1 << 16
BAD_GATEWAY = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Router:
    """Forwards requests to engines in turn."""

    def __init__(self, engine_ports: Sequence[int]) -> None:
        self._ports = list(engine_ports)
        self._next = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward the request of one connection, and its response."""
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._forward(await read_request(reader), writer)
        writer.close()

    async def _forward(self, request: bytes, client: asyncio.StreamWriter) -> None:
        first = self._next
        self._next = (first + 1) % len(self._ports)
        for attempt in range(len(self._ports)):
            if await relay(request, self._ports[(first + attempt) % len(self._ports)], client):
                return
        client.write(BAD_GATEWAY)
        await client.drain()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Read a request, and ask in it for a connection that ends with the response."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"\r\ncontent-length: *([0-9]+)", head, re.IGNORECASE)
    body = await reader.readexactly(int(length[1])) if length else b""
    head = re.sub(rb"\r\nconnection:[^\r]*", b"", head, flags=re.IGNORECASE)
    return head[:-2] + b"Connection: close\r\n\r\n" + body


async def relay(request: bytes, port: int, client: asyncio.StreamWriter) -> bool:
    """Send a request to an engine and its response to the client; return False if there was no response."""
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return False
    try:
        try:
            writer.write(request)
            await writer.drain()
            part = await reader.read(MAX_CHUNK)
        except ConnectionError:
            part = b""
        has_response = bool(part)
        while part:
            client.write(part)
            await client.drain()
            part = await reader.read(MAX_CHUNK)
        return has_response
    finally:
        writer.close()


async def serve(port: int, engine_ports: Sequence[int]) -> None:
    """Serve until the process is stopped."""
    server = await asyncio.start_server(Router(engine_ports).handle, HOST, port)
    async with server:
        await server.serve_forever()


def main() -> None:
    """Run the router."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("engine_ports", type=int, nargs="+")
    options = parser.parse_args()
    asyncio.run(serve(options.port, options.engine_ports))


if __name__ == "__main__":
    main()
