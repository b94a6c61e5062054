"""The Draft stream: a handshake, then one response for each request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Protocol, cast

import grpc
import structlog
from google.protobuf.message import DecodeError

from drafter_service.auth.callers import AccessControl, AuthorizedCall, Caller, Context, Right
from drafter_service.server.disk import LoadError
from drafter_service.server.namespace import ClosedError, IdentityError, StreamHandle
from drafter_service.server.namespaces import MemoryLimitError, NamespaceError, Namespaces
from drafter_service.server.requests import default_namespace, has_few_fields, read_engine, read_model, read_padding
from drafter_service.server.session import Session, error_response
from drafter_service.settings.tree import Limits
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import MAX_FIELDS, PROTOCOL, SHAPES, WireError

logger = structlog.get_logger(__name__)


class ProtocolError(ValueError):
    """The client uses another version of the protocol."""


REFUSALS: dict[type[Exception], grpc.StatusCode] = {
    NamespaceError: grpc.StatusCode.INVALID_ARGUMENT,
    WireError: grpc.StatusCode.INVALID_ARGUMENT,
    IdentityError: grpc.StatusCode.FAILED_PRECONDITION,
    MemoryLimitError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ClosedError: grpc.StatusCode.ABORTED,
    LoadError: grpc.StatusCode.UNAVAILABLE,
    ProtocolError: grpc.StatusCode.FAILED_PRECONDITION,
}
"""gRPC status codes of the exceptions that end a stream or a call."""


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


class StreamRights:
    """The rights of a stream's caller in its namespace. They are determined again when the callers file changes."""

    def __init__(self, authorized: AuthorizedCall, namespace: str) -> None:
        self._authorized = authorized
        self._namespace = namespace
        self._caller: Caller | None = None
        self._may_learn = False

    def may_learn(self) -> bool:
        """Return whether the caller may learn. Raises AccessDeniedError unless it may read."""
        caller = self._authorized.caller
        if caller is not self._caller:
            caller.require(Right.READ, self._namespace)
            self._caller, self._may_learn = caller, caller.may(Right.LEARN, self._namespace)
        return self._may_learn


class DraftStream(StreamHandle):
    """One engine's stream over the session of a namespace."""

    def __init__(
        self, limits: Limits, namespaces: Namespaces, authorized: AuthorizedCall, stack: AsyncExitStack
    ) -> None:
        """stack: closed at the end of the stream."""
        super().__init__(cast("asyncio.Task[object]", asyncio.current_task()))
        self.refused = 0
        """Number of refused requests."""
        self._limits, self._namespaces, self._authorized, self._stack = limits, namespaces, authorized, stack
        self._session: Session | None = None
        """None before the handshake."""

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
        if hello.protocol != PROTOCOL:
            raise ProtocolError(
                f"the client uses protocol {hello.protocol}, this service {PROTOCOL}; install the same version of both"
            )
        model = read_model(hello.model)
        name = hello.namespace or default_namespace(model)
        engine, padding = read_engine(hello), read_padding(hello)
        self._rights = StreamRights(self._authorized, name)
        may_learn = self._rights.may_learn()
        namespace = await self._stack.enter_async_context(self._namespaces.use_for_drafts(name, model))
        session = Session(namespace, self._limits, engine, SHAPES.get(hello.draft_shape), padding)
        self._stack.callback(session.close)
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
            )
        )
        self._session = session
        return response.SerializeToString()

    @property
    def dropped(self) -> ClosedError | None:
        """The error for a stream whose namespace was dropped, which has cancelled it."""
        if self._session is None or not self._session.namespace.is_closed:
            return None
        return ClosedError(f"namespace {self._session.namespace.name!r} was dropped")

    def _answer(self, session: Session, request: pb.DraftRequest | None) -> pb.DraftResponse:
        """Return the response to a request. Raises AccessDeniedError once the caller has lost its rights."""
        may_learn = self._rights.may_learn()
        if request is None:
            message = f"the message is not a DraftRequest of ssd.drafter.v1 with at most {MAX_FIELDS} sequences"
            response = error_response(0, grpc.StatusCode.INVALID_ARGUMENT, message)
        elif request.HasField("hello"):
            message = "hello is only valid in the first request of a stream"
            response = error_response(request.step, grpc.StatusCode.INVALID_ARGUMENT, message)
        else:
            response = session.answer(request, may_learn=may_learn)
        self.refused += response.HasField("error")
        return response


class DraftStreams:
    """All Draft streams of a service. Used by the event loop alone."""

    def __init__(self, namespaces: Namespaces, access: AccessControl, limits: Limits) -> None:
        self._namespaces = namespaces
        self._access = access
        self._limits = limits
        self.streams: set[DraftStream] = set()
        self._refused = 0
        """Number of refused streams, and of refused requests of streams that have ended."""
        self._stopping = False

    @property
    def refused(self) -> int:
        """Number of refused streams and requests."""
        return self._refused + sum(stream.refused for stream in self.streams)

    @asynccontextmanager
    async def open(self, context: Context) -> AsyncIterator[DraftStream]:
        """See `Streams`."""
        if len(self.streams) >= self._limits.streams:
            self._refused += 1
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"the service has its {self._limits.streams} streams already"
            )
        try:
            async with self._access.authorize(context) as authorized, AsyncExitStack() as stack:
                stream = DraftStream(self._limits, self._namespaces, authorized, stack)
                self.streams.add(stream)
                stack.callback(self._ended, stream)
                try:
                    yield stream
                except asyncio.CancelledError:
                    if stream.dropped is not None:
                        raise stream.dropped from None
                    if not self._stopping:
                        raise
        except tuple(REFUSALS) as refused:
            self._refused += 1
            # The message, which the client gets and logs, may quote its request.
            logger.warning("stream refused", reason=type(refused).__name__)
            await context.abort(REFUSALS[type(refused)], str(refused))

    def stop(self) -> None:
        """End every stream after the request in progress."""
        self._stopping = True
        for stream in self.streams:
            stream.end()

    def _ended(self, stream: DraftStream) -> None:
        self.streams.discard(stream)
        self._refused += stream.refused


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
