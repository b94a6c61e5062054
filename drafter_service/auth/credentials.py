"""The server's half of TLS, with certificates that are renewed while it runs."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

import grpc

from drafter_service.auth.config import AccessConfig
from drafter_service.auth.watched import Watched, read_file
from ssd.errors import UserError


class _Pem(NamedTuple):
    key: bytes
    certificate: bytes
    client_ca: bytes | None

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        pair = (self.key, self.certificate)
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=self.client_ca)


class _Renewal:
    """What gRPC asks at every connection."""

    def __init__(self, files: Watched[_Pem], served: _Pem) -> None:
        self._files = files
        self._served = served

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        """The certificates, if they are others than last time. A new object, since gRPC takes it for its own."""
        pem = self._files.current()
        if pem is self._served:
            return None
        self._served = pem
        return pem.configuration()


def server_credentials(config: AccessConfig) -> grpc.ServerCredentials | None:
    """For `add_secure_port`; None without TLS. Files that change serve the next connection.

    Raises UserError for files that cannot be used; later ones that cannot be are logged and ignored.
    """
    certificate, key, client_ca = config.certificate, config.key, config.client_ca
    if certificate is None or key is None:
        return None
    paths = [path for path in (certificate, key, client_ca) if path is not None]
    # A connection costs far more than to look at three files.
    files = Watched(paths, lambda: _read_pem(certificate, key, client_ca), check_interval_s=0)
    first = files.current()
    return grpc.dynamic_ssl_server_credentials(
        first.configuration(), _Renewal(files, first), require_client_authentication=client_ca is not None
    )


def _read_pem(certificate: Path, key: Path, client_ca: Path | None) -> _Pem:
    check_pair(certificate, key)
    roots = None
    if client_ca is not None:
        check_ca(client_ca, "client_ca")
        roots = read_file(client_ca, "client_ca")
    return _Pem(read_file(key, "key"), read_file(certificate, "certificate"), roots)


def check_pair(certificate: Path, key: Path) -> None:
    """Raises UserError unless these are a certificate and its key. gRPC would only fail its handshakes."""
    read_file(certificate, "certificate")
    read_file(key, "key")
    try:
        # A password, so that an encrypted key is an error and not a question at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError, ValueError) as problem:
        reason = getattr(problem, "reason", None) or problem
        raise UserError(f"certificate, key: {certificate} and {key} are no pair in PEM form: {reason}") from None


def check_ca(path: Path, what: str) -> None:
    """Raises UserError, in which `what` names the setting, unless these are certificates of CAs."""
    read_file(path, what)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except (ssl.SSLError, OSError, ValueError) as problem:
        raise UserError(f"{what}: {path} holds no certificates in PEM form ({problem})") from None
