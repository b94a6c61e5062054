"""Opening the address: never wider than was asked for."""

from __future__ import annotations

import grpc

from drafter_service.auth.config import AccessConfig
from drafter_service.auth.credentials import server_credentials
from drafter_service.transport.address import Address
from ssd.errors import UserError


def listen(server: grpc.aio.Server, address: Address, config: AccessConfig) -> Address:
    """Open the address for a server that has not started; returns it with the real port.

    Raises UserError for an address that is exposed, in use or not to be had, and for files that cannot be used.
    """
    check_exposure(address, config)
    credentials = server_credentials(config)
    address.claim()
    try:
        with address.permissions(config.socket_permissions):
            if credentials is None:
                port = server.add_insecure_port(address.text)
            else:
                port = server.add_secure_port(address.text, credentials)
    except RuntimeError:
        raise UserError(f"cannot listen at {address.text}: is the port in use, or not yours to use?") from None
    return address.at_port(port)


def check_exposure(address: Address, config: AccessConfig) -> None:
    """Raises UserError where strangers could read the traffic, or draft and learn, and nobody has asked for that."""
    if address.is_local or config.allow_plaintext:
        return
    if not config.has_tls:
        raise UserError(
            f"{address.text} is open to the network and its traffic would not be encrypted; give a certificate and "
            "a key, listen on a Unix socket or 127.0.0.1, or say --allow-plaintext"
        )
    if config.callers is None and config.client_ca is None:
        raise UserError(
            f"{address.text} is open to the network and everybody there would have every right; say who may call "
            "with a callers file (ssd-drafter token makes its entries) or with client_ca"
        )
