"""The gRPC server: one corpus, many streams, health and reflection.

One event loop serves all streams, which keeps the round trip short; the maintainer of the corpus
works in a thread of its own.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from typing import cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from drafter_service.address import Address
from drafter_service.session import Session
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.wire import MAX_MESSAGE_BYTES
from ssd.build import new_corpus, new_drafter
from ssd.config import DrafterConfig
from ssd.errors import UserError
from ssd.stats import Stats

SERVICE = pb.DESCRIPTOR.services_by_name["DrafterService"].full_name
GRACE_S = 2.0
"""How long the last replies may take to leave after the server was told to stop."""


class DrafterServer:
    """Serves one corpus at one address."""

    def __init__(self, config: DrafterConfig, address: Address) -> None:
        """Raises ValueError for a capacity that a corpus cannot have."""
        self.stats = Stats()
        self._config = config
        self.address = address
        """With the real port, once it listens."""
        self._corpus = new_corpus(config)
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._streams: set[asyncio.Task[object]] = set()
        self._stopping = False

    async def start(self) -> None:
        """Listen. Raises UserError if the address cannot be had."""
        self.address.claim()
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                # Without this two servers share a port and each gets some of the streams.
                ("grpc.so_reuseport", 0),
            ]
        )
        handler = grpc.stream_stream_rpc_method_handler(
            self._draft, response_serializer=pb.DraftReply.SerializeToString
        )
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"Draft": handler})])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection([SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        try:
            self.address = self.address.at_port(server.add_insecure_port(self.address.text))
        except RuntimeError:
            raise UserError(f"cannot listen at {self.address.text}: is the port in use, or not yours to use?") from None
        self._corpus.maintain(self._config.refresh_interval_s)
        await server.start()
        self._server = server
        for service in (SERVICE, ""):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> None:
        """Say so to those that ask for health, end every stream after the message in hand, release everything."""
        self._stopping = True
        await self._health.enter_graceful_shutdown()
        for stream in self._streams:
            stream.cancel()
        if self._server is not None:
            await self._server.stop(GRACE_S)
        self._corpus.close()

    async def _draft(
        self, requests: AsyncIterator[bytes], _context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.DraftReply]:
        stream = cast("asyncio.Task[object]", asyncio.current_task())
        session = Session(new_drafter(self._config, corpus=self._corpus, stats=self.stats))
        self._streams.add(stream)
        try:
            async for data in requests:
                yield session.answer(data)
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        finally:
            self._streams.discard(stream)
            session.close()


async def serve_until_signalled(server: DrafterServer, ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM; `ready` is called once streams are welcome."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    await server.start()
    ready()
    await stopping.wait()
    await server.stop()
