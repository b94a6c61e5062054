"""The Draft stream: a handshake, then one response for each request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from typing import cast

import grpc
import structlog
from google.protobuf.message import DecodeError

from drafter_service.auth.callers import AccessControl, AuthorizedCall, Caller, Context, Right
from drafter_service.server.namespace import ClosedError, IdentityError, StreamHandle
from drafter_service.server.namespaces import MemoryLimitError, NamespaceError, Namespaces
from drafter_service.server.requests import (
    MAX_FIELDS,
    default_namespace,
    has_few_fields,
    read_engine,
    read_model,
    read_padding,
)
from drafter_service.server.retries import LoadError
from drafter_service.server.session import Session, error_response
from drafter_service.server.step_socket import Answer, Send
from drafter_service.settings.tree import Limits
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import PROTOCOL, SHAPES, WireError

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


class DraftStreams:
    """All Draft streams of a service. Used by the event loop alone."""

    def __init__(self, namespaces: Namespaces, access: AccessControl, limits: Limits) -> None:
        self._namespaces = namespaces
        self._access = access
        self._limits = limits
        self.streams: set[StreamHandle] = set()
        self.refused = 0
        """Number of refused streams and requests."""
        self._stopping = False

    async def draft(
        self,
        requests: AsyncIterator[bytes],
        context: Context,
        on_open: Callable[[Answer], None] = lambda _: None,
    ) -> AsyncGenerator[pb.DraftResponse, None]:
        """Serve one engine's stream.

        on_open: called after the first request, with a function that answers a request. It may be called while
        `requests` waits for the next request. If it raises, `requests` must raise the same exception.
        """
        if len(self.streams) >= self._limits.streams:
            self.refused += 1
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"the service has its {self._limits.streams} streams already"
            )
        stream = StreamHandle(cast("asyncio.Task[object]", asyncio.current_task()))
        self.streams.add(stream)
        try:
            async with (
                self._access.authorize(context) as authorized,
                aclosing(self._serve(requests, authorized, stream, on_open)) as served,
            ):
                async for response in served:
                    stream.is_answering = True
                    yield response
                    stream.is_answering = False
                    if stream.is_over:
                        stream.task.cancel()
        except tuple(REFUSALS) as refused:
            self.refused += 1
            # The message, which the client gets and logs, may quote its request.
            logger.warning("stream refused", reason=type(refused).__name__)
            await context.abort(REFUSALS[type(refused)], str(refused))
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        finally:
            self.streams.discard(stream)

    def stop(self) -> None:
        """End every stream after the request in progress."""
        self._stopping = True
        for stream in self.streams:
            stream.end()

    async def _serve(
        self,
        requests: AsyncIterator[bytes],
        authorized: AuthorizedCall,
        stream: StreamHandle,
        on_open: Callable[[Answer], None],
    ) -> AsyncGenerator[pb.DraftResponse, None]:
        first = await anext(aiter(requests), None)
        if first is None:
            return
        request = _parsed(first)
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
        rights = StreamRights(authorized, name)
        rights.may_learn()
        async with AsyncExitStack() as stack:
            namespace = await stack.enter_async_context(self._namespaces.use_for_drafts(name, model))
            shape = SHAPES.get(hello.draft_shape)
            session = Session(namespace, self._limits, engine, shape, padding)
            namespace.streams.add(stream)
            try:
                response = self._answer(session, request, rights, is_first=True)
                session.record()
                response.welcome.CopyFrom(_welcome(session, self._limits, may_learn=rights.may_learn()))
                yield response

                def answer(data: bytes, send: Send) -> None:
                    send(self._answer(session, _parsed(data), rights))
                    session.record()

                on_open(answer)
                async for data in requests:
                    response = self._answer(session, _parsed(data), rights)
                    session.record()
                    yield response
            except asyncio.CancelledError:
                if namespace.is_closed:
                    raise ClosedError(f"namespace {name!r} was dropped") from None
                raise
            finally:
                namespace.streams.discard(stream)
                session.close()

    def _answer(
        self, session: Session, request: pb.DraftRequest | None, rights: StreamRights, *, is_first: bool = False
    ) -> pb.DraftResponse:
        """Return the response to a request. Raises AccessDeniedError once the caller has lost its rights."""
        may_learn = rights.may_learn()
        if request is None:
            message = f"the message is not a DraftRequest of ssd.drafter.v1 with at most {MAX_FIELDS} sequences"
            response = error_response(0, grpc.StatusCode.INVALID_ARGUMENT, message)
        elif request.HasField("hello") and not is_first:
            message = "hello is only valid in the first request of a stream"
            response = error_response(request.step, grpc.StatusCode.INVALID_ARGUMENT, message)
        else:
            response = session.answer(request, may_learn=may_learn)
        self.refused += response.HasField("error")
        return response


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


def _welcome(session: Session, limits: Limits, *, may_learn: bool) -> pb.Welcome:
    namespace = session.namespace
    return pb.Welcome(
        protocol=PROTOCOL,
        namespace=namespace.name,
        may_learn=may_learn,
        max_draft=session.max_draft,
        max_sequences=limits.sequences,
        max_tokens=limits.stream_tokens,
    )
