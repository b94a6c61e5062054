"""Options with which commands connect to a running service."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

DEFAULT_ADDRESS = "unix:/tmp/ssd-drafter.sock"
"""Default address of `ssd-drafter serve`."""

_FILE = click.Path(dir_okay=False, path_type=Path)


ACCESS_OPTIONS = (
    click.option("--token-file", type=_FILE, help="File with a bearer token."),
    click.option("--key", type=_FILE, help="Private key of --certificate."),
    click.option("--certificate", type=_FILE, help="Certificate of the caller, for mutual TLS."),
    click.option("--ca", type=_FILE, help="CAs of the service's certificate; enables TLS."),
)


def connection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the connection options to a command, passed as one argument `link`."""

    @functools.wraps(command)
    def with_link(
        *args: Any,
        address: str,
        ca: Path | None,
        certificate: Path | None,
        key: Path | None,
        token_file: Path | None,
        **options: Any,
    ) -> Any:
        return command(*args, link=Link(address, ca, certificate, key, token_file), **options)

    address = click.option("--address", default=DEFAULT_ADDRESS, metavar="ADDRESS", help="Address of the service.")
    return address(access_options(with_link))


def access_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of authentication to a command."""
    for option in ACCESS_OPTIONS:
        command = option(command)
    return command


class Link:
    """Address of a service and the files for authentication. Nothing is opened yet."""

    def __init__(
        self, address: str, ca: Path | None, certificate: Path | None, key: Path | None, token: Path | None
    ) -> None:
        self.address = address
        self._files = ca, certificate, key, token

    def connector(self) -> Any:
        """Return the `Connector` for the address and files. Raises UserError for unusable files."""
        from drafter_service.auth.connector import ClientAccess, Connector
        from drafter_service.transport.address import Address
        from ssd.errors import UserError

        ca, certificate, key, token = self._files
        try:
            access = ClientAccess(ca=ca, certificate=certificate, key=key, token=token)
        except ValueError as problem:
            raise UserError(f"--{problem}") from None
        return Connector(Address.parse(self.address), access)

    @contextmanager
    def stub(self) -> Iterator[tuple[Any, Any]]:
        """Yield a stub of the service and the metadata of its calls. RPC errors become UserError."""
        import grpc

        from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
        from ssd.errors import UserError

        connector = self.connector()
        with connector.open() as channel:
            try:
                yield DrafterServiceStub(channel), connector.metadata()
            except grpc.RpcError as error:
                raise UserError(self.describe(error)) from None

    def describe(self, error: Any) -> str:
        """Return a message to the user about an RPC error."""
        import grpc

        from drafter_service.observability.report.units import shortened
        from drafter_service.transport.address import NOT_READY, absence, start_one, system_error

        details = shortened(str(error.details() or error.code().name), 300)
        if details.startswith(NOT_READY):
            return f"the drafter at {self.address} is {details}"
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return absence(self.address, "no answer in time")
        if error.code() is grpc.StatusCode.CANCELLED:
            return f"the drafter at {self.address} was stopped before it had answered; {start_one(self.address)}"
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return absence(self.address, system_error(details))
        return f"the drafter at {self.address} refused: {details}"
