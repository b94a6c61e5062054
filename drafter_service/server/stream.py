"""The streams: Draft, a handshake, then one response for each request; and Follow, a copy of a namespace.

Follow sends what a namespace remembers and every change of it to clients that draft from a copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from drafter_service.auth.callers import AccessControl, AuthorizedCall, Caller, Context, Right
from drafter_service.observability.facts import ModelIdentity
from drafter_service.server.calls import (
    PACKAGE,
    ProtocolError,
    Refusals,
    StreamLimitError,
    answering,
    check_protocol,
    parsed,
)
from drafter_service.server.feed import CopyStream
from drafter_service.server.namespace import StreamHandle
from drafter_service.server.namespaces import Namespaces
from drafter_service.server.requests import has_few_fields, read_engine, read_model, read_padding
from drafter_service.server.session import Session, error_response
from drafter_service.settings.tree import Limits
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import MAX_FIELDS, PROTOCOL, SHAPES, WireError, check_engine_name
from ssd.corpus.ring import MAX_CAPACITY

Later = Coroutine[Any, Any, bytes]
"""A serialized response that has to be awaited."""


class OpenStream(Protocol):
    """A stream whose caller is known."""

    is_sending: bool
    """Whether a response is being sent."""

    def answer(self, data: bytes) -> bytes | Later:
        """Return the serialized response to a request, now or later. An exception ends the stream."""

    def sent(self) -> None:
        """Do what the last request needs once its response is sent."""


class Streams(Protocol):
    """Answers Draft streams, over any transport."""

    def open(self, context: Context) -> AbstractAsyncContextManager[OpenStream]:
        """Serve one stream within the block, whose exceptions end it with a status, as `context.abort` does."""


def draft_method(streams: Streams) -> grpc.RpcMethodHandler:
    """Return gRPC's handler of Draft, to which messages are passed as bytes.

    gRPC would report one that it cannot parse as an internal error.
    """

    async def draft(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        async with streams.open(context) as stream:
            async for data in requests:
                response = stream.answer(data)
                if not isinstance(response, bytes):
                    response = await response
                stream.is_sending = True
                yield response
                stream.is_sending = False
                stream.sent()

    return grpc.stream_stream_rpc_method_handler(draft)


class OpenStreams:
    """The open streams of a method. Used by the event loop alone."""

    def __init__(self, access: AccessControl, most: int, what: str, refusals: Refusals) -> None:
        """most: largest number of streams. what: their name, such as "streams"."""
        self.refusals = refusals
        self._access, self._most, self._what = access, most, what
        self._streams: set[StreamHandle] = set()
        self._stopping = False

    @asynccontextmanager
    async def open(self, stream: StreamHandle, context: Context) -> AsyncIterator[AuthorizedCall]:
        """Serve a stream within the block, whose exceptions end it with a status, as `answering` does."""
        async with answering(self._access, context, partial(self.refusals.record, "stream refused")) as authorized:
            if len(self._streams) >= self._most:
                raise StreamLimitError(f"the service has its {self._most} {self._what} already")
            self._streams.add(stream)
            try:
                yield authorized
            except asyncio.CancelledError:
                if stream.namespace is not None:
                    stream.namespace.check_is_open()
                if not self._stopping:
                    raise
            finally:
                self._streams.discard(stream)

    def stop(self) -> None:
        """End every stream after the response in progress."""
        self._stopping = True
        for stream in self._streams:
            stream.end()


class DraftStream(StreamHandle):
    """One engine's stream over the session of a namespace."""

    def __init__(self, streams: OpenStreams, namespaces: Namespaces, limits: Limits) -> None:
        super().__init__()
        self._streams, self._namespaces, self._limits = streams, namespaces, limits
        self._session: Session | None = None
        """None before the handshake."""

    def begin(self, authorized: AuthorizedCall, stack: AsyncExitStack) -> None:
        """Begin for a caller; stack: closed at the end of the stream."""
        self._authorized, self._stack = authorized, stack
        self._caller: Caller | None = None
        """The caller whose rights were determined; another one once the callers file has changed."""

    def answer(self, data: bytes) -> bytes | Later:
        """See `OpenStream`."""
        request = _parsed(data)
        if self._session is None:
            return self._begin(request)
        return self._answer(self._session, request).SerializeToString()

    def sent(self) -> None:
        """See `OpenStream`."""
        if self._session is not None:
            self._session.record()
        if self.is_over:
            self.task.cancel()

    async def _begin(self, request: pb.DraftRequest | None) -> bytes:
        """Answer the first request."""
        if request is None or not request.HasField("hello"):
            raise WireError("the first request of a stream has no hello")
        hello = request.hello
        check_protocol(hello.protocol)
        model = read_model(hello.model)
        name = hello.namespace or self._namespaces.default_of(model, self._authorized.caller)
        engine, padding = read_engine(hello), read_padding(hello)
        may_learn = self._has_right_to_learn(name)
        namespace = await self._stack.enter_async_context(self._namespaces.use_for_drafts(name, model))
        counted = hello.counted if hello.HasField("counted") else None
        session = Session(namespace, self._limits, engine, SHAPES.get(hello.draft_shape), padding, counted)
        self._stack.callback(session.close)
        self.namespace = namespace
        namespace.streams.add(self)
        self._stack.callback(namespace.streams.discard, self)
        request.ClearField("hello")
        response = self._answer(session, request)
        response.welcome.CopyFrom(
            pb.Welcome(
                protocol=PROTOCOL,
                namespace=namespace.name,
                may_learn=may_learn,
                max_draft=session.max_draft,
                max_sequences=self._limits.sequences,
                max_tokens=self._limits.stream_tokens,
                vocab_size=namespace.model.vocab_size,
                held=self._namespaces.held(namespace, partial(self._authorized.caller.may, Right.READ)),
            )
        )
        self._session = session
        return response.SerializeToString()

    def _answer(self, session: Session, request: pb.DraftRequest | None) -> pb.DraftResponse:
        """Return the response to a request. Raises PermissionDeniedError once the caller has lost its rights."""
        may_learn = self._has_right_to_learn(session.namespace.name)
        if request is None:
            message = f"the message is not a DraftRequest of {PACKAGE} with at most {MAX_FIELDS} sequences"
            response = error_response(0, grpc.StatusCode.INVALID_ARGUMENT, message)
        elif request.HasField("hello"):
            message = "hello is only valid in the first request of a stream"
            response = error_response(request.step, grpc.StatusCode.INVALID_ARGUMENT, message)
        else:
            response = session.answer(request, may_learn=may_learn)
        self._streams.refusals.total += response.HasField("error")
        return response

    def _has_right_to_learn(self, namespace: str) -> bool:
        """Return whether the caller may learn. Raises PermissionDeniedError unless it may read."""
        caller = self._authorized.caller
        if caller is not self._caller:
            caller.require(Right.READ, namespace)
            self._caller, self._may_learn = caller, caller.may(Right.LEARN, namespace)
        return self._may_learn


class DraftStreams:
    """All Draft streams of a service. Used by the event loop alone."""

    def __init__(self, namespaces: Namespaces, access: AccessControl, limits: Limits, refusals: Refusals) -> None:
        self.all = OpenStreams(access, limits.streams, "streams", refusals)
        self._namespaces, self._limits = namespaces, limits

    @asynccontextmanager
    async def open(self, context: Context) -> AsyncIterator[DraftStream]:
        """See `Streams`."""
        stream = DraftStream(self.all, self._namespaces, self._limits)
        async with self.all.open(stream, context) as authorized, AsyncExitStack() as stack:
            stream.begin(authorized, stack)
            yield stream


class FollowStreams:
    """All Follow streams of a service. Used by the event loop alone."""

    def __init__(self, namespaces: Namespaces, access: AccessControl, most: int, refusals: Refusals) -> None:
        """most: largest number of streams."""
        self.all = OpenStreams(access, most, "followers", refusals)
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


def _parsed(data: bytes) -> pb.DraftRequest | None:
    # Empty sequences take fifty times as much memory once they are parsed.
    if not has_few_fields(data, MAX_FIELDS):
        return None
    request = pb.DraftRequest()
    try:
        request.ParseFromString(data)
    except DecodeError:
        return None
    return request
