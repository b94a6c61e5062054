"""Open the server's address: exposure check, TLS with certificates that may be renewed, socket permissions."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import grpc

from drafter_service.auth.watched import Watched, check_ca, check_pair, read_file
from drafter_service.settings.tree import AccessConfig
from drafter_service.transport.address import Address
from ssd.errors import UserError


def listen(server: grpc.aio.Server, address: Address, config: AccessConfig) -> Address:
    """Open the address for a server that has not started. Return it with the actual port.

    Raises UserError for an exposed or unavailable address, and for unusable files.
    """
    check_exposure(address, config)
    credentials = server_credentials(config)
    address.claim()
    try:
        with address.permissions(config.socket_permissions):
            address.check_bindable()
            if credentials is None:
                port = server.add_insecure_port(address.text)
            else:
                port = server.add_secure_port(address.text, credentials)
    except RuntimeError:
        raise UserError(f"cannot listen at {address.text}; choose another address") from None
    return address.at_port(port)


def check_exposure(address: Address, config: AccessConfig) -> None:
    """Raise UserError if others on the network could read the traffic or use the service, unless that is allowed."""
    if address.is_local or config.allow_plaintext:
        return
    if not config.has_tls:
        raise UserError(
            f"{address.text} is open to the network and its traffic would not be encrypted; give a certificate and "
            "a key, listen on a Unix socket or 127.0.0.1, or add --allow-plaintext"
        )
    if config.callers is None and config.client_ca is None:
        raise UserError(
            f"{address.text} is open to the network and everybody there would have every right; restrict callers "
            "with a callers file (ssd-drafter token makes its entries) or with client_ca"
        )


def server_credentials(config: AccessConfig) -> grpc.ServerCredentials | None:
    """Return credentials for `add_secure_port`; None without TLS. Changed files apply to the next connection.

    Raises UserError for unusable files. Later changes that make them unusable are logged and ignored.
    """
    certificate, key, client_ca = config.certificate, config.key, config.client_ca
    if certificate is None or key is None:
        return None
    paths = [path for path in (certificate, key, client_ca) if path is not None]
    # Checking three files is cheap compared with a connection.
    files = Watched(paths, lambda: _read_pem(certificate, key, client_ca), check_interval_s=0)
    served = files.current()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Return the certificates if they have changed. gRPC takes ownership, so the object is always new."""
        nonlocal served
        before, served = served, files.current()
        return None if served is before else served.configuration()

    return grpc.dynamic_ssl_server_credentials(
        served.configuration(), renewed, require_client_authentication=client_ca is not None
    )


class _Pem(NamedTuple):
    key: bytes
    certificate: bytes
    client_ca: bytes | None

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        pair = (self.key, self.certificate)
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=self.client_ca)


def _read_pem(certificate: Path, key: Path, client_ca: Path | None) -> _Pem:
    check_pair(certificate, key)
    roots = None
    if client_ca is not None:
        check_ca(client_ca, "client_ca")
        roots = read_file(client_ca, "client_ca")
    return _Pem(read_file(key, "key"), read_file(certificate, "certificate"), roots)
