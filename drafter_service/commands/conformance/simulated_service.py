"""A service that simulates the real one at an address, over both transports, and checks the engine which uses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import grpc

from drafter_service.auth.callers import Context
from drafter_service.auth.listening import listen
from drafter_service.commands.conformance.engine_side import EngineChecker
from drafter_service.server.step_socket import StepSocket
from drafter_service.server.stream import Streams, draft_method
from drafter_service.settings.tree import AccessConfig
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.address import Address
from drafter_service.transport.wire import MESSAGE_SIZES

SERVICE = pb.DESCRIPTOR.services_by_name["DrafterService"].full_name
LATE_S = 0.3
"""Delay of a late answer; longer than the deadline of an engine that waits for drafts at all."""
POLL_S = 0.05
MAX_CONNECTIONS = 64


class CheckedStreams:
    """Draft streams whose requests an `EngineChecker` answers. Used by one event loop."""

    def __init__(self, checker: EngineChecker) -> None:
        self.checker = checker
        self.last_request = asyncio.get_running_loop().time()
        """Time of the last request, by the event loop's clock."""

    @asynccontextmanager
    async def open(self, context: Context) -> AsyncIterator[CheckedStream]:
        """See `drafter_service.server.stream.Streams`."""
        stream = CheckedStream(self, context)
        try:
            yield stream
        finally:
            self.checker.closed(stream.checked)


class CheckedStream:
    """One stream."""

    is_sending = False

    def __init__(self, streams: CheckedStreams, context: Context) -> None:
        self._streams, self._context = streams, context
        self.checked = streams.checker.opened()

    async def answer(self, data: bytes) -> bytes:
        """Check a request, and answer it as planned."""
        self._streams.last_request = asyncio.get_running_loop().time()
        response = self._streams.checker.reply(self.checked, data)
        if response is None:
            await self._context.abort(grpc.StatusCode.UNAVAILABLE, "the conformance test breaks this stream")
        await asyncio.sleep(LATE_S if self.checked.is_late else 0)
        return response.SerializeToString()

    def sent(self) -> None:
        """Do nothing."""


class SimulatedServer:
    """Serves streams at an address over both transports. Used by one event loop."""

    def __init__(self, streams: Streams, address: Address, *, has_steps: bool = True) -> None:
        """has_steps: whether there is a step socket beside a Unix socket."""
        self._streams, self.has_steps = streams, has_steps
        self.address = address

    async def start(self) -> None:
        """Listen, and set the address to the actual one. Raises UserError for one that cannot be used."""
        self._steps = StepSocket(self._streams, MAX_CONNECTIONS)
        self._server = grpc.aio.server(options=[*MESSAGE_SIZES, ("grpc.so_reuseport", 0)])
        handlers = {"Draft": draft_method(self._streams)}
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
        self.address.claim()
        if self.has_steps and self.address.steps is not None:
            await self._steps.start(self.address.steps, AccessConfig().socket_permissions)
        self.address = listen(self._server, self.address, AccessConfig())
        await self._server.start()

    async def stop(self) -> None:
        """End all streams."""
        with suppress(asyncio.CancelledError):
            await asyncio.gather(self._server.stop(0), self._steps.stop(0))


async def run_engine_checks(
    address: Address, checker: EngineChecker, idle_s: float, ready: Callable[[str], None]
) -> None:
    """Serve at an address until everything was tested, or no request has come for `idle_s` seconds.

    ready: called with the address once streams are accepted. Raises UserError for an address that cannot be used.
    """
    streams = CheckedStreams(checker)
    server = SimulatedServer(streams, address)
    try:
        await server.start()
        ready(server.address.text)
        while not checker.is_complete and asyncio.get_running_loop().time() < streams.last_request + idle_s:
            await asyncio.sleep(POLL_S)
    finally:
        await server.stop()
    checker.conclude()
