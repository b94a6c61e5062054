"""What users read if no drafter answers at an address."""

import socket
import threading
from contextlib import closing, contextmanager

import pytest

from drafter_service.client import DrafterClient
from drafter_service.client.connection import AbsentError
from drafter_service.commands.link import Link
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.address import absence, system_error
from ssd.errors import UserError
from tests.drafter_service.raw import eventually

UNRESOLVED = (
    "errors resolving nowhere:1: [field:hostname lookup error:address lookup failed for nowhere:1: "
    "Domain name not found]"
)
REFUSED = (
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: "
    "connect: Connection refused (111)"
)


@pytest.mark.parametrize(
    ("details", "error"), [(UNRESOLVED, "Domain name not found"), (REFUSED, "Connection refused (111)"), ("a", "a")]
)
def test_the_error_of_the_system_is_the_end_of_that_of_grpc(details, error):
    assert system_error(details) == error


@contextmanager
def closing_server():
    """Yield the address of a server that closes every connection after the first bytes, as one with TLS does."""

    def run():
        with server:
            while True:
                connection, _ = server.accept()
                with connection:
                    if not connection.recv(1):
                        return

    server = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=run)
    thread.start()
    host, port = server.getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        socket.create_connection((host, port)).close()
        thread.join()


def messages(address):
    """Return the errors of a command and of a client at an address without a drafter."""
    with pytest.raises(UserError) as of_command, Link(address=address).stub() as (stub, _):
        stub.ListNamespaces(pb.ListNamespacesRequest())
    with closing(DrafterClient(address, required=False)) as client:
        eventually(lambda: client._connection.last_end is not None)
        of_client = client._connection.failure(address)
    assert isinstance(of_client, AbsentError)
    return str(of_command.value), str(of_client)


def test_commands_and_clients_name_the_error_and_the_command_that_starts_a_drafter(socket_address):
    expected = (
        f"no drafter answers at {socket_address} (No such file or directory); "
        f"start one with: ssd-drafter serve --listen {socket_address}"
    )
    assert messages(socket_address) == (expected, expected)


def test_only_connections_that_were_closed_are_said_to_need_tls():
    with closing_server() as address:
        for message in messages(address):
            assert "if it uses TLS, give its CA" in message
    assert not any("TLS" in message for message in messages("127.0.0.1:1"))


def test_a_host_that_does_not_resolve_is_not_said_to_need_a_drafter():
    message = absence("nowhere.example:1", system_error(UNRESOLVED))
    assert message == "the host of nowhere.example:1 does not resolve (Domain name not found); check its name"


def test_a_socket_of_another_user_is_not_said_to_be_missing():
    assert absence("unix:/s", "Permission denied").startswith("you may not use unix:/s")
