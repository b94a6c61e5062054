"""Connections of a client: TLS, the client's certificate, and its bearer token.

The token is sent as metadata of each call. gRPC's own call credentials do not work with Unix sockets and loopback.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from drafter_service.auth.watched import Watched, check_ca, check_pair, read_file
from drafter_service.transport.address import Address
from drafter_service.transport.wire import MESSAGE_SIZES
from ssd.errors import UserError

ChannelOptions = Sequence[tuple[str, int | str]]
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ClientAccess:
    """Files with which a client authenticates the service and itself. All are PEM except the token."""

    ca: Path | None = None
    """CAs of the service's certificate. Setting it enables TLS."""
    certificate: Path | None = None
    """The client's certificate and intermediate ones, for a service with `client_ca`."""
    key: Path | None = None
    """The private key of the client's certificate."""
    token: Path | None = None
    """A file that contains a bearer token and nothing else."""
    server_name: str | None = None
    """Name in the service's certificate. Default: the host of the address, `localhost` for a socket."""
    allow_plaintext: bool = False
    """Send the token unencrypted over a network."""

    def __post_init__(self) -> None:
        """Raise ValueError for contradictory settings."""
        for given, needed in (("certificate", "key"), ("key", "certificate"), ("certificate", "ca")):
            if getattr(self, given) is not None and getattr(self, needed) is None:
                raise ValueError(f"{given} needs {needed}")


class Connector:
    """Opens channels to one address. Certificates are read for each channel, so renewed ones apply to the next."""

    def __init__(self, address: Address, access: ClientAccess, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Check the files. Raises UserError for unusable ones, and for a token sent unencrypted over a network."""
        self.address = address
        self._access = access
        self._token: Watched[str] | None = None
        if (path := access.token) is not None:
            if access.ca is None and not address.is_local and not access.allow_plaintext:
                raise UserError(f"the token would be sent to {address.text} unencrypted; give a ca, or allow_plaintext")
            self._token = Watched([path], lambda: read_token(path), clock=clock)
        self._credentials()

    def open(self, options: ChannelOptions = ()) -> grpc.Channel:
        """Open a new channel. Raises UserError for files that have become unusable."""
        options = [*MESSAGE_SIZES, *options]
        credentials = self._credentials()
        if credentials is None:
            return grpc.insecure_channel(self.address.text, options=options)
        return grpc.secure_channel(self.address.text, credentials, options=self._with_name(options))

    def connect_steps(self, timeout_s: float) -> socket.socket | None:
        """Connect to the step socket; return None if no server listens there, with TLS, and for a network address.

        Raises OSError if the process has no free file descriptor.
        """
        steps = self.address.steps
        if self._access.ca is not None or steps is None or steps.socket_path is None or not steps.socket_path.exists():
            return None
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(steps.socket_path))
        except OSError:
            connection.close()
            return None
        return connection

    def authorization(self) -> str:
        """Return the authorization header with the current token; "" without one."""
        return "" if self._token is None else f"Bearer {self._token.current()}"

    def metadata(self) -> Metadata:
        """Return the metadata that every call must have."""
        return (("authorization", self.authorization()),) if self._token else ()

    def _with_name(self, options: ChannelOptions) -> ChannelOptions:
        # By default gRPC would compare the path of the socket with the certificate.
        name = self._access.server_name or (None if self.address.socket_path is None else "localhost")
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
    """Return the token in a file. Raises UserError, which does not quote it, for any other contents."""
    token = read_file(path, "token").strip()
    if not token.isascii() or not token.decode("latin1").isprintable() or b" " in token or not token:
        raise UserError(f"token: {path} does not contain exactly one token; make one with: ssd-drafter token")
    return token.decode()
