"""Options with which commands connect to a running service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from drafter_service.settings import DEFAULT_ADDRESS
from drafter_service.settings.flags import File, Flag, takes
from ssd.errors import UserError


@dataclass(frozen=True)
class AccessFiles:
    """Files for authentication."""

    ca: File | None = None
    """CAs of the service's certificate; enables TLS."""
    certificate: File | None = None
    """Certificate of the caller, for mutual TLS."""
    key: File | None = None
    """Private key of --certificate."""
    token_file: File | None = None
    """File with a bearer token."""


@dataclass(frozen=True)
class Link(AccessFiles):
    """Address of a service and the files for authentication. Nothing is opened yet."""

    address: Annotated[str, Flag(metavar="ADDRESS")] = DEFAULT_ADDRESS
    """Address of the service."""

    def connector(self) -> Any:
        """Return the `Connector` for the address and files. Raises UserError for unusable files."""
        from drafter_service.auth.connector import ClientAccess, Connector
        from drafter_service.transport.address import Address

        try:
            access = ClientAccess(self.ca, self.certificate, self.key, self.token_file)
        except ValueError as problem:
            raise UserError(f"--{problem}") from None
        return Connector(Address.parse(self.address), access)

    @contextmanager
    def stub(self) -> Iterator[tuple[Any, Any]]:
        """Yield a stub of the service and the metadata of its calls. RPC errors become UserError."""
        import grpc

        from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub

        connector = self.connector()
        with connector.open() as channel:
            try:
                yield DrafterServiceStub(channel), connector.metadata()
            except grpc.RpcError as error:
                raise UserError(self.describe(error)) from None

    def describe(self, error: Any) -> str:
        """Return a message to the user about an RPC error."""
        import grpc

        from drafter_service.client.connection import find_other_server
        from drafter_service.observability.pages.units import shortened
        from drafter_service.transport.address import NOT_READY, absence, start_one, system_error

        details = shortened(str(error.details() or error.code().name), 300)
        if details.startswith(NOT_READY):
            return f"the drafter at {self.address} is {details}"
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return absence(self.address, "no answer in time")
        if error.code() is grpc.StatusCode.CANCELLED:
            return f"the drafter at {self.address} was stopped before it had answered; {start_one(self.address)}"
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            if (problem := find_other_server(self.address)) is not None:
                return str(problem)
            return absence(self.address, system_error(details))
        return f"the drafter at {self.address} refused: {details}"


connection_options = takes(Link, "link")
"""Decorator that adds the connection options to a command, passed as one argument `link`."""
