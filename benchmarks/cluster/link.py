"""A network link that can be cut: a TCP proxy between a sidecar and Redis.

While the link is cut it holds all bytes, and connections are accepted but not forwarded, so that neither end learns of
it. After it is healed everything arrives, as TCP delivers it after a partition.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

HOST = "127.0.0.1"
MAX_CHUNK = 1 << 16


class Link:
    """Forwards connections to a port in a thread of its own, from `open` until `close`."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._loop = asyncio.new_event_loop()
        self._is_whole = asyncio.Event()
        self._is_whole.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server
        self.port = 0
        """Port to connect to, once it is open."""
        self.bytes = 0
        """Bytes forwarded in both directions."""

    def open(self) -> None:
        """Listen."""
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._accept, HOST, 0))
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Forward nothing from now on."""
        self._loop.call_soon_threadsafe(self._is_whole.clear)

    def heal(self) -> None:
        """Forward what was held, and everything from now on."""
        self._loop.call_soon_threadsafe(self._is_whole.set)

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._run(self._cancel())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _cancel(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await self._is_whole.wait()
        with suppress(OSError):
            target_reader, target_writer = await asyncio.open_connection(HOST, self._target_port)
            with suppress(OSError):
                await asyncio.gather(self._copy(reader, target_writer), self._copy(target_reader, writer))
            target_writer.close()
        writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction until it ends, then end the other connection."""
        try:
            while part := await reader.read(MAX_CHUNK):
                await self._is_whole.wait()
                self.bytes += len(part)
                writer.write(part)
                await writer.drain()
            await self._is_whole.wait()
        finally:
            writer.close()
