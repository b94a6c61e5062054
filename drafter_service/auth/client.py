"""How a client connects: TLS, its own certificate, and its bearer token.

The token travels as metadata of each call. gRPC's own call credentials would refuse Unix sockets and loopback.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from drafter_service.auth.credentials import check_ca, check_pair
from drafter_service.auth.watched import Watched, read_file
from drafter_service.transport.address import Address
from ssd.errors import UserError

ChannelOptions = Sequence[tuple[str, int | str]]
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ClientAccess:
    """What a client trusts and presents. All files are PEM, but for the token."""

    ca: Path | None = None
    """The CAs that the service's certificate may come from; given, the connection is encrypted."""
    certificate: Path | None = None
    """The client's own certificate and those between it and its CA, for a service that asks for one."""
    key: Path | None = None
    """The private key of the client's certificate."""
    token: Path | None = None
    """A file that holds a bearer token and nothing else."""
    server_name: str | None = None
    """The name that the service's certificate must bear: by default the address's host, `localhost` for a socket."""
    allow_plaintext: bool = False
    """Send the token over a network that is not encrypted."""

    def __post_init__(self) -> None:
        """Raises ValueError for settings that contradict one another."""
        for given, needed in (("certificate", "key"), ("key", "certificate"), ("certificate", "ca")):
            if getattr(self, given) is not None and getattr(self, needed) is None:
                raise ValueError(f"{given} needs {needed}")


class Connector:
    """Opens channels to one address. Certificates are read for each channel, so a renewed one serves the next."""

    def __init__(self, address: Address, access: ClientAccess, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises UserError for files that cannot be used and for a token that others could read on its way."""
        self._address = address
        self._access = access
        self._token: Watched[str] | None = None
        if (path := access.token) is not None:
            if access.ca is None and not address.is_local and not access.allow_plaintext:
                raise UserError(f"the token would travel to {address.text} in the open; give a ca, or allow_plaintext")
            self._token = Watched([path], lambda: read_token(path), clock=clock)
        self._credentials()

    def open(self, options: ChannelOptions = ()) -> grpc.Channel:
        """A new channel. Raises UserError for files that cannot be used any more."""
        credentials = self._credentials()
        if credentials is None:
            return grpc.insecure_channel(self._address.text, options=options)
        return grpc.secure_channel(self._address.text, credentials, options=self._with_name(options))

    @property
    def steps_path(self) -> Path | None:
        """The socket for steps alone, where there may be one: it knows no TLS."""
        steps = self._address.steps if self._access.ca is None else None
        return None if steps is None else steps.socket_path

    def connect_steps(self, timeout_s: float) -> socket.socket | None:
        """A connection to the socket for steps; None if nobody answers there.

        Raises OSError for a process that cannot have one more descriptor.
        """
        path = self.steps_path
        if path is None or not path.exists():
            return None
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
        except OSError:
            connection.close()
            return None
        return connection

    def open_aio(self, options: ChannelOptions = ()) -> grpc.aio.Channel:
        """A new channel for asyncio. Raises UserError for files that cannot be used any more."""
        credentials = self._credentials()
        if credentials is None:
            return grpc.aio.insecure_channel(self._address.text, options=options)
        return grpc.aio.secure_channel(self._address.text, credentials, options=self._with_name(options))

    def authorization(self) -> str:
        """The token as it travels, that of the file now; "" without one."""
        return "" if self._token is None else f"Bearer {self._token.current()}"

    def metadata(self) -> Metadata:
        """What every call must carry."""
        return (("authorization", self.authorization()),) if self._token else ()

    def _with_name(self, options: ChannelOptions) -> ChannelOptions:
        # gRPC would look for the path of a socket in the certificate.
        name = self._access.server_name or (None if self._address.socket_path is None else "localhost")
        return options if name is None else [*options, ("grpc.ssl_target_name_override", name)]

    def _credentials(self) -> grpc.ChannelCredentials | None:
        access = self._access
        if access.ca is None:
            return None
        check_ca(access.ca, "ca")
        key = certificate = None
        if access.certificate is not None and access.key is not None:
            check_pair(access.certificate, access.key)
            key, certificate = read_file(access.key, "key"), read_file(access.certificate, "certificate")
        return grpc.ssl_channel_credentials(read_file(access.ca, "ca"), key, certificate)


def read_token(path: Path) -> str:
    """The token in a file. Raises UserError, without quoting it, for anything else than one."""
    token = read_file(path, "token").strip()
    if not token.isascii() or not token.decode("latin1").isprintable() or b" " in token or not token:
        raise UserError(f"token: {path} holds something else than one token; make one with: ssd-drafter token")
    return token.decode()
