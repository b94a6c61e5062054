"""The address of the service: its gRPC server, which also answers while the service is not ready yet."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from typing import NoReturn

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from drafter_service.auth.callers import access_control
from drafter_service.auth.listening import listen
from drafter_service.observability.process import allow_files
from drafter_service.settings.tree import ServiceConfig
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.address import NOT_READY, STATE, Address
from drafter_service.transport.wire import MESSAGE_SIZES

logger = structlog.get_logger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["DrafterService"].full_name
FILES = 256
"""Number of descriptors needed in addition to those of streams."""
GRPC_OPTIONS = (
    *MESSAGE_SIZES,
    # Otherwise two servers could share a port, and each would receive some of the streams.
    ("grpc.so_reuseport", 0),
)


class Listener:
    """Listens at the address. Calls are refused with UNAVAILABLE, and health checks fail, until `serve`."""

    def __init__(self, config: ServiceConfig) -> None:
        """Read certificates and callers. Raises UserError for an address or a file that cannot be used."""
        self._config = config
        self.address = Address.parse(config.listen)
        """Address of the server; with the actual port once it listens."""
        self.access = access_control(config.access, check_interval_s=math.inf)
        """The callers file, which `Housekeeping` checks in a thread, so that calls do not wait for a file system."""
        self.state = "starting"
        """What the service does until it is ready, in ASCII."""
        self._methods = _Methods(self)
        self._health = _Health(self)
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen. Raises UserError if the address cannot be used."""
        files = FILES + 2 * self._config.limits.streams
        if not allow_files(files):
            logger.warning("few files may be opened", needed=files, advice="raise the limit (ulimit -n, LimitNOFILE)")
        server = grpc.aio.server(options=GRPC_OPTIONS)
        server.add_generic_rpc_handlers([self._methods])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self.address = listen(server, self.address, self._config.access)
        self._server = server
        await server.start()

    async def serve(self, handlers: Mapping[str, grpc.RpcMethodHandler]) -> None:
        """Answer calls with these handlers, by the name of the method, and report the service as ready."""
        self._methods.handlers = handlers
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def refuse(self) -> None:
        """Fail health checks from now on; calls in progress continue."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float | None) -> None:
        """Stop listening; calls in progress may take up to `grace_s` more seconds."""
        if self._server is not None:
            await self._server.stop(grace_s)

    async def _set_health(self, status: int) -> None:
        for service in (SERVICE, ""):
            await self._health.set(service, status)


class _Methods(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The methods of the service."""

    def __init__(self, listener: Listener) -> None:
        self.handlers: Mapping[str, grpc.RpcMethodHandler] | None = None
        """None while the service is not ready."""
        self._listener = listener

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        service, _, method = handler_call_details.method.lstrip("/").partition("/")
        if service != SERVICE:
            return None
        if self.handlers is None:
            return grpc.stream_stream_rpc_method_handler(self._not_ready)
        return self.handlers.get(method)

    async def _not_ready(self, _requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> NoReturn:
        await context.abort(grpc.StatusCode.UNAVAILABLE, f"{NOT_READY}{self._listener.state}")
        raise AssertionError  # `abort` raises.


class _Health(health.aio.HealthServicer):  # type: ignore[misc]
    """Health checks whose responses have the state of the service as metadata."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """See `HealthServicer`."""
        context.set_trailing_metadata(((STATE, self._listener.state),))
        return await super().Check(request, context)
