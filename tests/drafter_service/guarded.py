"""A small service with access control, and calls to it."""

from __future__ import annotations

import asyncio
import functools
from contextlib import asynccontextmanager

import grpc

from drafter_service.auth.callers import Right, access_control, sha256_of
from drafter_service.auth.connector import ClientAccess, Connector
from drafter_service.auth.listening import listen
from drafter_service.server.calls import answering
from drafter_service.settings.tree import AccessConfig
from drafter_service.transport.address import Address

TIMEOUT_S, RUN_TIMEOUT_S = 60, 240
"""Timeouts of a call and of a test, in seconds; long enough for busy machines."""
RIGHTS = {"Read": Right.READ, "Learn": Right.LEARN, "Admin": Right.ADMIN}


def caller_entry(name, namespaces, *rights, token=None):
    """Return an entry of a callers file; the token is the name by default."""
    return (
        f'[[caller]]\nname = "{name}"\ntoken_sha256 = "{sha256_of(token or name)}"\n'
        f'namespaces = ["{namespaces}"]\nrights = {[*rights]}\n'
    )


class Clock:
    """A clock that tests set."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Guarded:
    """A running service with one method for each right; each returns the caller's name."""

    def __init__(self, config, address, clock):
        self.control = access_control(config, clock=clock)
        self.clock = clock
        self.config = config
        self.address = Address.parse(address)

    async def call(self, namespace="any", right="Read", access=ClientAccess(), metadata=None):  # noqa: B008  # frozen
        """Return the answer to one call over its own connection. Raises AioRpcError."""
        connector = Connector(self.address, access)
        async with open_aio(connector) as channel:
            method = channel.unary_unary(f"/test.Guarded/{right}")
            given = connector.metadata() if metadata is None else metadata
            return (await method(namespace.encode(), metadata=given, timeout=TIMEOUT_S)).decode()

    async def refusal(self, *args, **kwargs):
        """Return the status code and the details that a call ends with."""
        try:
            caller = await self.call(*args, **kwargs)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details()
        raise AssertionError(f"answered as {caller}")

    async def is_connected(self, access):
        """Return whether TLS and a call succeed. Failures other than that of the connection are raised."""
        try:
            await self.call(access=access)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True

    def handlers(self):
        unary = {name: grpc.unary_unary_rpc_method_handler(self._method(right)) for name, right in RIGHTS.items()}
        return grpc.method_handlers_generic_handler("test.Guarded", unary)

    def _method(self, right):
        async def answer(request, context):
            async with answering(self.control, context, lambda _: None) as authorized:
                authorized.require(right, request.decode())
                return authorized.caller.name.encode()

        return answer


def open_aio(connector):
    """Return an asyncio channel with the credentials of a connector."""
    credentials, options = connector._credentials(), connector._with_name([])
    if credentials is None:
        return grpc.aio.insecure_channel(connector.address.text)
    return grpc.aio.secure_channel(connector.address.text, credentials, options=options)


@asynccontextmanager
async def guarded(config=AccessConfig(), address="127.0.0.1:0", clock=None):  # noqa: B008  # frozen
    """Serve with `config`. Files are checked when `clock` has advanced by a second."""
    service = Guarded(config, address, clock or Clock())
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([service.handlers()])
    service.address = listen(server, service.address, config)
    await server.start()
    try:
        yield service
    finally:
        await server.stop(0)


def run(test):
    """Run a coroutine function as a test, with a timeout."""

    @functools.wraps(test)  # pytest reads the names of fixtures from it.
    def runs(*args, **kwargs):
        async def bounded():
            async with asyncio.timeout(RUN_TIMEOUT_S):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return runs
