"""Code that all calls share: their callers, their messages, their ends, and the status codes of errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from drafter_service.auth.callers import (
    AccessControl,
    AuthorizedCall,
    Context,
    PermissionDeniedError,
    UnauthenticatedError,
)
from drafter_service.server.disk import LoadError
from drafter_service.server.feed import UnwrittenError
from drafter_service.server.namespace import ClosedError, IdentityError, UnpublishedError
from drafter_service.server.namespaces import MemoryLimitError, NamespaceError
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import PROTOCOL, WireError
from ssd.corpus.sections import SnapshotError

PACKAGE = pb.DESCRIPTOR.package


class ProtocolError(ValueError):
    """The client and this service do not fit together, such as by the version of the protocol."""


REFUSALS: dict[type[Exception], grpc.StatusCode] = {
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    NamespaceError: grpc.StatusCode.INVALID_ARGUMENT,
    WireError: grpc.StatusCode.INVALID_ARGUMENT,
    IdentityError: grpc.StatusCode.FAILED_PRECONDITION,
    MemoryLimitError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ClosedError: grpc.StatusCode.ABORTED,
    LoadError: grpc.StatusCode.UNAVAILABLE,
    ProtocolError: grpc.StatusCode.FAILED_PRECONDITION,
    SnapshotError: grpc.StatusCode.FAILED_PRECONDITION,
    UnwrittenError: grpc.StatusCode.UNAVAILABLE,
    UnpublishedError: grpc.StatusCode.FAILED_PRECONDITION,
}
"""gRPC status codes of the exceptions that end a stream or a call; those of derived classes are the same."""


@asynccontextmanager
async def answering(access: AccessControl, context: Context) -> AsyncIterator[AuthorizedCall]:
    """Identify the caller of a call, and end it with the status of an exception raised in the block."""
    try:
        yield AuthorizedCall(context, access)
    except tuple(REFUSALS) as refused:
        code = next(code for kind, code in REFUSALS.items() if isinstance(refused, kind))
        await context.abort(code, str(refused))


def unary_method(
    access: AccessControl, method: Callable[[Any, AuthorizedCall], Awaitable[Any]], kind: Any
) -> grpc.RpcMethodHandler:
    """Return gRPC's handler of a call; method: takes its message, which is of the type `kind`, and its caller."""

    async def call(data: bytes, context: Context) -> bytes:
        async with answering(access, context) as authorized:
            response: bytes = (await method(parsed(kind, data), authorized)).SerializeToString()
            return response
        raise AssertionError("an error ends the call")

    return grpc.unary_unary_rpc_method_handler(call)


def parsed(kind: Any, data: bytes) -> Any:
    """Return the message of a type that the bytes hold; WireError otherwise.

    gRPC passes bytes, since it would report a message that it cannot parse as an internal error.
    """
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
