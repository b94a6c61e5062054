"""The Follow streams: what a namespace remembers and every change of it, for clients that draft from a copy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc

from drafter_service.auth.callers import AccessControl, AuthorizedCall, Context, Right
from drafter_service.observability.facts import ModelIdentity
from drafter_service.server.calls import OpenStreams, ProtocolError, check_protocol, parsed
from drafter_service.server.feed import CopyStream
from drafter_service.server.namespace import StreamHandle
from drafter_service.server.namespaces import Namespaces
from drafter_service.server.requests import read_model
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import check_engine_name
from ssd.corpus.ring import MAX_CAPACITY


class FollowStreams:
    """All Follow streams of a service. Used by the event loop alone."""

    def __init__(self, namespaces: Namespaces, access: AccessControl, most: int) -> None:
        """most: largest number of streams."""
        self.all = OpenStreams(access, most, "followers")
        self._namespaces = namespaces

    async def follow(self, data: bytes, context: Context) -> AsyncGenerator[pb.FollowResponse, None]:
        """Serve one client."""
        stream = StreamHandle()
        async with (
            self.all.open(stream, context) as authorized,
            aclosing(self._serve(data, authorized, stream)) as served,
        ):
            async for response in served:
                stream.is_sending = True
                yield response
                stream.is_sending = False
                if stream.is_over:
                    stream.task.cancel()
                    await asyncio.sleep(0)  # Otherwise it would be cancelled while gRPC sends the next response.

    async def _serve(
        self, data: bytes, authorized: AuthorizedCall, stream: StreamHandle
    ) -> AsyncGenerator[pb.FollowResponse, None]:
        request = parsed(pb.FollowRequest, data)
        check_protocol(request.protocol)
        model = read_model(request.model)
        name = request.namespace or self._namespaces.default_of(model, authorized.caller)
        authorized.require(Right.READ, name)
        # The right to read does not include completing the identity: another model may follow this as its library.
        async with self._namespaces.use_for_drafts(name, ModelIdentity()) as namespace:
            for each in (name, *namespace.libraries):
                self._namespaces.loaded[each].check_identity(model)
            if request.match_depth not in (0, namespace.corpus.depth):
                raise ProtocolError(
                    f"namespace {name!r} has a match depth of {namespace.corpus.depth}, the engine of "
                    f"{request.match_depth}; set match_depth to the same"
                )
            check_engine_name(request.engine, "engine")
            most = request.max_tokens or MAX_CAPACITY
            libraries = [each for each in namespace.libraries if authorized.caller.may(Right.READ, each)]
            state = CopyStream(name, request.copy, request.position, most, request.engine, libraries)
            stream.namespace = namespace
            namespace.followers[stream] = state
            try:
                async with aclosing(namespace.feed.responses(namespace.corpus, state)) as responses:
                    async for response in responses:
                        authorized.require(Right.READ, name)
                        yield response
            finally:
                del namespace.followers[stream]


def follow_method(streams: FollowStreams) -> grpc.RpcMethodHandler:
    """Return gRPC's handler of Follow."""
    return grpc.unary_stream_rpc_method_handler(streams.follow, response_serializer=pb.FollowResponse.SerializeToString)
