"""Serves the checks of an engine at an address, over gRPC and the step socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc

from drafter_service.auth.control import Context
from drafter_service.auth.listening import listen
from drafter_service.commands.conformance.engine_side import EngineChecker
from drafter_service.server.step_socket import StepSocket
from drafter_service.server.stream import draft_method
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
        self._checker = checker
        self.last_request = asyncio.get_running_loop().time()
        """Time of the last request, by the event loop's clock."""

    @asynccontextmanager
    async def open(self, context: Context) -> AsyncIterator[CheckedStream]:
        """See `drafter_service.server.stream.Streams`."""
        stream = CheckedStream(self, self._checker, context)
        try:
            yield stream
        finally:
            self._checker.closed(stream.checked)


class CheckedStream:
    """One stream."""

    is_sending = False

    def __init__(self, streams: CheckedStreams, checker: EngineChecker, context: Context) -> None:
        self._streams, self._checker, self._context = streams, checker, context
        self.checked = checker.opened()

    async def answer(self, data: bytes) -> bytes:
        """Check a request, and answer it as planned."""
        self._streams.last_request = asyncio.get_running_loop().time()
        reply = self._checker.answer(self.checked, data)
        if reply.response is None:
            await self._context.abort(grpc.StatusCode.UNAVAILABLE, "the conformance test breaks this stream")
        await asyncio.sleep(LATE_S if reply.is_late else 0)
        return reply.response.SerializeToString()

    def sent(self) -> None:
        """Do nothing."""


async def run_engine_checks(
    address: Address, checker: EngineChecker, idle_s: float, ready: Callable[[str], None]
) -> None:
    """Serve at an address until everything was tested, or no request has come for `idle_s` seconds.

    ready: called with the address once streams are accepted. Raises UserError for an address that cannot be used.
    """
    streams = CheckedStreams(checker)
    steps = StepSocket(streams, MAX_CONNECTIONS)
    server = grpc.aio.server(options=[*MESSAGE_SIZES, ("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"Draft": draft_method(streams)})])
    try:
        address.claim()
        if address.steps is not None:
            steps.bind(address.steps, AccessConfig().socket_permissions)
        address = listen(server, address, AccessConfig())
        await steps.start()
        await server.start()
        ready(address.text)
        while not checker.is_complete and asyncio.get_running_loop().time() < streams.last_request + idle_s:
            await asyncio.sleep(POLL_S)
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(server.stop(0), steps.stop(0))
    checker.conclude()
