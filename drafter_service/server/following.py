"""The Follow streams: what a namespace remembers and every change of it, for clients that draft from a copy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

import grpc
import structlog
from google.protobuf.message import DecodeError

from drafter_service.auth.callers import AccessControl, AuthorizedCall, Context, Right
from drafter_service.server.namespace import ClosedError, StreamHandle
from drafter_service.server.namespaces import Namespaces
from drafter_service.server.requests import default_namespace, read_model
from drafter_service.server.stream import REFUSALS, ProtocolError
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import PROTOCOL, WireError
from ssd.corpus.sections import SnapshotError

logger = structlog.get_logger(__name__)


class FollowStreams:
    """All Follow streams of a service. Used by the event loop alone."""

    def __init__(self, namespaces: Namespaces, access: AccessControl, most: int) -> None:
        """most: largest number of streams."""
        self._namespaces = namespaces
        self._access = access
        self._most = most
        self._streams: set[StreamHandle] = set()
        self._stopping = False

    async def follow(self, data: bytes, context: Context) -> AsyncGenerator[pb.FollowResponse, None]:
        """Serve one client."""
        if len(self._streams) >= self._most:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"the service has its {self._most} followers already"
            )
        stream = StreamHandle(cast("asyncio.Task[object]", asyncio.current_task()))
        self._streams.add(stream)
        try:
            async with (
                self._access.authorize(context) as authorized,
                aclosing(self._serve(data, authorized, stream)) as served,
            ):
                async for response in served:
                    stream.is_sending = True
                    yield response
                    stream.is_sending = False
                    if stream.is_over:
                        stream.task.cancel()
                        await asyncio.sleep(0)  # Otherwise it would be cancelled while gRPC sends the next response.
        except (SnapshotError, OSError, MemoryError, RuntimeError) as problem:
            if isinstance(problem, tuple(REFUSALS)):
                await context.abort(REFUSALS[type(problem)], str(problem))
            logger.error("copy not sent", reason=str(problem) or type(problem).__name__)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the service cannot write a snapshot now")
        except tuple(REFUSALS) as refused:
            logger.warning("follower refused", reason=type(refused).__name__)
            await context.abort(REFUSALS[type(refused)], str(refused))
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        finally:
            self._streams.discard(stream)

    def stop(self) -> None:
        """End every stream."""
        self._stopping = True
        for stream in self._streams:
            stream.end()

    async def _serve(
        self, data: bytes, authorized: AuthorizedCall, stream: StreamHandle
    ) -> AsyncGenerator[pb.FollowResponse, None]:
        try:
            request = pb.FollowRequest.FromString(data)
        except DecodeError:
            raise WireError("the message is not a FollowRequest of ssd.drafter.v1") from None
        if request.protocol != PROTOCOL:
            raise ProtocolError(
                f"the client uses protocol {request.protocol}, this service {PROTOCOL}; install the same version"
            )
        model = read_model(request.model)
        name = request.namespace or default_namespace(model)
        authorized.require(Right.READ, name)
        async with self._namespaces.use(name, model) as namespace:
            namespace.followers.add(stream)
            try:
                responses = namespace.feed.responses(name, namespace.corpus, request.copy, request.position)
                async with aclosing(responses):
                    async for response in responses:
                        authorized.require(Right.READ, name)
                        yield response
            except asyncio.CancelledError:
                if namespace.is_closed:
                    raise ClosedError(f"namespace {name!r} was dropped") from None
                raise
            finally:
                namespace.followers.discard(stream)
