"""Code that all calls share: their callers, their messages, their ends, and the status codes of errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from drafter_service.auth.callers import (
    AccessControl,
    AuthorizedCall,
    Context,
    PermissionDeniedError,
    UnauthenticatedError,
)
from drafter_service.server.disk import LoadError, in_thread
from drafter_service.server.feed import UnwrittenError
from drafter_service.server.namespace import ClosedError, IdentityError, UnpublishedError
from drafter_service.server.namespaces import MemoryLimitError, NamespaceError
from drafter_service.server.requests import TOO_MANY_TEXTS, has_few_fields
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import MAX_TEXTS, PROTOCOL, WireError
from ssd.corpus.sections import SnapshotError

logger = structlog.get_logger(__name__)

PACKAGE = pb.DESCRIPTOR.package

LARGE_BYTES = 1 << 17
"""Least size of a large message. It is parsed in a thread: 65,536 names take 40 ms."""
MAX_LARGE_CALLS = 4
"""Maximum number of calls of a unary method with large messages, or whose messages are being received; others wait. A
message of 64 MB needs about three times as much memory."""
RECEIVE_LIMIT_S = 60.0
"""Time in which a message must arrive once it is received, in seconds."""


class ProtocolError(ValueError):
    """The client and this service do not fit together, such as by the version of the protocol."""


class StreamLimitError(RuntimeError):
    """The service has as many streams as it may have."""


REFUSALS: dict[type[Exception], grpc.StatusCode] = {
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    NamespaceError: grpc.StatusCode.INVALID_ARGUMENT,
    WireError: grpc.StatusCode.INVALID_ARGUMENT,
    IdentityError: grpc.StatusCode.FAILED_PRECONDITION,
    MemoryLimitError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StreamLimitError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ClosedError: grpc.StatusCode.ABORTED,
    LoadError: grpc.StatusCode.UNAVAILABLE,
    ProtocolError: grpc.StatusCode.FAILED_PRECONDITION,
    SnapshotError: grpc.StatusCode.FAILED_PRECONDITION,
    UnwrittenError: grpc.StatusCode.UNAVAILABLE,
    UnpublishedError: grpc.StatusCode.FAILED_PRECONDITION,
}
"""gRPC status codes of the exceptions that end a stream or a call; those of derived classes are the same."""


class Refusals:
    """Counts and logs what is refused. Used by the event loop alone."""

    def __init__(self) -> None:
        self.total = 0
        """Number of calls, streams and requests of streams that were refused."""

    def record(self, event: str, reason: Exception, **details: str) -> None:
        """Count and log one; event: what was refused."""
        self.total += 1
        # The message, which the client gets and logs, may quote its request.
        logger.warning(event, reason=type(reason).__name__, **details)


@asynccontextmanager
async def answering(
    access: AccessControl, context: Context, on_refused: Callable[[Exception], None]
) -> AsyncIterator[AuthorizedCall]:
    """Identify the caller of a call, and end it with the status of an exception raised in the block.

    on_refused: called with the exception, unless a namespace was dropped, which refuses nothing.
    """
    try:
        yield AuthorizedCall(context, access)
    except tuple(REFUSALS) as refused:
        if not isinstance(refused, ClosedError):
            on_refused(refused)
        code = next(code for kind, code in REFUSALS.items() if isinstance(refused, kind))
        await context.abort(code, str(refused))


def unary_method(
    access: AccessControl,
    method: Callable[[Any, AuthorizedCall], Awaitable[Any]],
    kind: Any,
    on_refused: Callable[[Exception], None],
) -> grpc.RpcMethodHandler:
    """Return gRPC's handler of a call; method: takes its message, which is of the type `kind`, and its caller.

    on_refused: as in `answering`. To gRPC it is a method with a stream of messages, so that a message is not received
    before its turn.
    """
    turns = asyncio.Semaphore(MAX_LARGE_CALLS)

    async def call(messages: AsyncIterator[bytes], context: Context) -> bytes:
        async with answering(access, context, on_refused) as authorized, AsyncExitStack() as turn:
            await turn.enter_async_context(turns)
            data = await _received(messages)
            if len(data) < LARGE_BYTES:
                await turn.aclose()
                request = parsed(kind, data)
            else:
                request = await in_thread(parsed, kind, data)
            del data
            response: bytes = (await method(request, authorized)).SerializeToString()
            return response
        raise AssertionError("an error ends the call")

    return grpc.stream_unary_rpc_method_handler(call)


async def _received(messages: AsyncIterator[bytes]) -> bytes:
    """Return the message of a unary call. Raises WireError if there is none."""
    try:
        async with asyncio.timeout(RECEIVE_LIMIT_S):
            async for data in messages:
                return data
    except TimeoutError:
        raise WireError(f"the message was not received within {RECEIVE_LIMIT_S:.0f} s") from None
    raise WireError("the call has no message")


def parsed(kind: Any, data: bytes) -> Any:
    """Return the message of a type that the bytes hold; WireError otherwise, and for too many texts.

    gRPC passes bytes, since it would report a message that it cannot parse as an internal error.
    """
    # The 16 are other fields of the request and its texts.
    if kind is pb.ObserveRequest and not has_few_fields(data, MAX_TEXTS + 16, pb.ObserveRequest.TEXTS_FIELD_NUMBER):
        raise WireError(TOO_MANY_TEXTS)
    try:
        return kind.FromString(data)
    except DecodeError:
        raise WireError(f"the message is not a {kind.__name__} of {PACKAGE}") from None


def check_protocol(version: int) -> None:
    """Raise ProtocolError for a client that uses another version of the protocol."""
    if version != PROTOCOL:
        raise ProtocolError(
            f"the client uses protocol {version}, this service {PROTOCOL}; install the same version of both"
        )
