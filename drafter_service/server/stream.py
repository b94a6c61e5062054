"""The Draft stream: who is there, then one response for each request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import cast

import grpc
import structlog
from google.protobuf.message import DecodeError

from drafter_service.auth.callers import Right
from drafter_service.auth.control import AccessControl, AuthorizedCall, Context
from drafter_service.observability.facts import ModelIdentity
from drafter_service.server.identity import default_namespace
from drafter_service.server.namespace import ClosedError, IdentityError, Stream
from drafter_service.server.namespaces import BudgetError, NamespaceError, Namespaces
from drafter_service.server.session import Session, refusal
from drafter_service.server.sessions import Orphans
from drafter_service.settings.tree import Limits
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.messages import MOST_FIELDS, has_few_fields, pack_resumed, read_model
from drafter_service.transport.wire import WireError

logger = structlog.get_logger(__name__)

PROTOCOL = 2
OLDEST_PROTOCOL = 1
"""Clients of protocol 1 say no hello."""
DEFAULT_NAMESPACE = "default"
CLIENT_ID_BYTES = 16

REFUSALS = {
    NamespaceError: grpc.StatusCode.INVALID_ARGUMENT,
    WireError: grpc.StatusCode.INVALID_ARGUMENT,
    IdentityError: grpc.StatusCode.FAILED_PRECONDITION,
    BudgetError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ClosedError: grpc.StatusCode.ABORTED,
}
"""What ends a stream or a call, with which status."""


class VersionError(ValueError):
    """Client and service have no protocol in common."""


class Drafting:
    """All Draft streams of a service. The event loop alone uses it."""

    def __init__(self, namespaces: Namespaces, access: AccessControl, limits: Limits) -> None:
        self._namespaces = namespaces
        self._access = access
        self._limits = limits
        self.orphans = Orphans(limits.grace_s, limits.streams)
        self.streams: set[Stream] = set()
        self.refused = 0
        """Streams and requests."""
        self._stopping = False

    async def draft(self, requests: AsyncIterator[bytes], context: Context) -> AsyncGenerator[pb.DraftResponse, None]:
        """One engine's stream."""
        if len(self.streams) >= self._limits.streams:
            self.refused += 1
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"the service has its {self._limits.streams} streams already"
            )
        stream = Stream(cast("asyncio.Task[object]", asyncio.current_task()))
        self.streams.add(stream)
        try:
            async with (
                self._access.authorize(context) as authorized,
                aclosing(self._serve(requests, authorized, stream)) as served,
            ):
                async for response in served:
                    stream.is_answering = True
                    yield response
                    stream.is_answering = False
                    if stream.is_over:
                        stream.task.cancel()
        except (*REFUSALS, VersionError) as refused:
            self.refused += 1
            logger.warning("stream refused", reason=str(refused))
            await context.abort(REFUSALS.get(type(refused), grpc.StatusCode.FAILED_PRECONDITION), str(refused))
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        finally:
            self.streams.discard(stream)

    def stop(self) -> None:
        """End every stream after the message in hand."""
        self._stopping = True
        for stream in self.streams:
            stream.end()

    async def _serve(
        self, requests: AsyncIterator[bytes], authorized: AuthorizedCall, stream: Stream
    ) -> AsyncGenerator[pb.DraftResponse, None]:
        first = await anext(aiter(requests), None)
        if first is None:
            return
        request = _parsed(first)
        hello = request.hello if request is not None and request.HasField("hello") else pb.Hello(protocol=1)
        model, name = _read_hello(hello)
        authorized.require(Right.READ, name)
        async with AsyncExitStack() as stack:
            namespace = await stack.enter_async_context(self._namespaces.use(name, model))
            owner, client_id = authorized.caller.name, hello.client_id
            session = self.orphans.adopt(owner, client_id, namespace)
            if session is None:
                session = Session(namespace, self._limits)
            namespace.streams.add(stream)
            try:
                welcome = _welcome(session, name, authorized, self._limits) if hello.protocol >= PROTOCOL else None
                response = self._answer(session, request, authorized, is_first=True)
                if welcome is not None:
                    response.welcome.CopyFrom(welcome)
                yield response
                async for data in requests:
                    yield self._answer(session, _parsed(data), authorized)
            except asyncio.CancelledError:
                if namespace.is_closed:
                    raise ClosedError(f"namespace {name!r} was dropped") from None
                raise
            finally:
                namespace.streams.discard(stream)
                self.orphans.keep(owner, client_id, session)

    def _answer(
        self, session: Session, request: pb.DraftRequest | None, authorized: AuthorizedCall, *, is_first: bool = False
    ) -> pb.DraftResponse:
        """The response to a request. Raises AccessDeniedError once the caller's rights are gone."""
        name = session.namespace.name
        authorized.require(Right.READ, name)
        if request is None:
            message = f"the message is not a DraftRequest of ssd.drafter.v1 with at most {MOST_FIELDS} sequences"
            response = refusal(0, grpc.StatusCode.INVALID_ARGUMENT, message)
        elif request.HasField("hello") and not is_first:
            message = "hello belongs into the first request of a stream, and into no other"
            response = refusal(request.step, grpc.StatusCode.INVALID_ARGUMENT, message)
        else:
            response = session.answer(request, may_learn=authorized.caller.may(Right.LEARN, name))
        self.refused += response.HasField("error")
        return response


def _parsed(data: bytes) -> pb.DraftRequest | None:
    # Empty sequences take fifty times their bytes once they are parsed.
    if not has_few_fields(data, MOST_FIELDS):
        return None
    request = pb.DraftRequest()
    try:
        request.ParseFromString(data)
    except DecodeError:
        return None
    return request


def _read_hello(hello: pb.Hello) -> tuple[ModelIdentity, str]:
    """What is served, and the namespace's name. Raises VersionError and WireError."""
    if hello.oldest_protocol > PROTOCOL:
        raise VersionError(
            f"the client speaks protocol {hello.oldest_protocol} or later, this service {OLDEST_PROTOCOL} to "
            f"{PROTOCOL}; upgrade the service first"
        )
    if hello.protocol < OLDEST_PROTOCOL:
        raise VersionError("hello.protocol is missing")
    if len(hello.client_id) not in (0, CLIENT_ID_BYTES):
        raise WireError(f"hello.client_id has {len(hello.client_id)} bytes, not {CLIENT_ID_BYTES}")
    model = read_model(hello.model)
    if hello.protocol < PROTOCOL:
        return model, DEFAULT_NAMESPACE
    return model, hello.namespace or default_namespace(model)


def _welcome(session: Session, name: str, authorized: AuthorizedCall, limits: Limits) -> pb.Welcome:
    """Before the first request has any effect."""
    ids, lengths = pack_resumed(session.sizes())
    return pb.Welcome(
        protocol=PROTOCOL,
        namespace=name,
        learns=authorized.caller.may(Right.LEARN, name),
        max_draft=session.max_draft,
        resumed_ids=ids,
        resumed_lengths=lengths,
        most_sequences=limits.sequences,
        most_tokens=limits.stream_tokens,
    )
