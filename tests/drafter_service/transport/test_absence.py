"""What users read if no drafter answers at an address."""

import socket
import threading
from contextlib import closing, contextmanager

import pytest

from drafter_service.client import DrafterClient
from drafter_service.client.connection import AbsentError, check_address
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
    ("details", "message"),
    [
        (UNRESOLVED, "the host of nowhere:1 does not resolve (Domain name not found); check its name"),
        (REFUSED, "no drafter answers at nowhere:1 (Connection refused (111)); start one with: ssd-drafter serve"),
        ("Permission denied", "you may not use nowhere:1 (Permission denied); ask its owner"),
        ("Broken pipe", "no drafter answers at nowhere:1 (Broken pipe); if it uses TLS, give its CA and, if"),
    ],
)
def test_the_reason_is_the_error_of_the_system_and_decides_the_advice(details, message):
    assert absence("nowhere:1", system_error(details)).startswith(message)


@contextmanager
def answering(answer):
    """Yield the address of a server that answers the first bytes of a connection with others, and closes it."""

    def run():
        with server:
            while True:
                connection, _ = server.accept()
                with connection:
                    if stopping.is_set():
                        return
                    if connection.recv(1 << 16):
                        connection.sendall(answer)

    stopping = threading.Event()
    server = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=run)
    thread.start()
    host, port = server.getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        stopping.set()
        socket.create_connection((host, port)).close()
        thread.join()


def messages(address):
    """Return the errors of a command and of a client at an address without a drafter."""
    with pytest.raises(UserError) as of_command, Link(address=address).stub() as (stub, _):
        stub.ListNamespaces(pb.ListNamespacesRequest())
    with closing(DrafterClient(address, required=False)) as client:
        eventually(lambda: client._connection.last_end is not None)
        of_client = client._connection.failure
    assert isinstance(of_client, AbsentError)
    return str(of_command.value), str(of_client)


def test_commands_and_clients_name_the_error_and_the_command_that_starts_a_drafter(socket_address):
    expected = (
        f"no drafter answers at {socket_address} (No such file or directory); "
        f"start one with: ssd-drafter serve --listen {socket_address}"
    )
    assert messages(socket_address) == (expected, expected)
    assert not any("TLS" in message for message in messages("127.0.0.1:1"))


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "an HTTP server"),
        (b"<!DOCTYPE HTML>", "an HTTP server"),
        (b"-ERR unknown command 'PRI'\r\n", "a Redis server"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "an SSH server"),
        (b"220 mail\r\n", "another kind of server"),
    ],
)
def test_a_server_of_another_kind_is_named(answer, kind):
    with answering(answer) as address:
        expected = (
            f"{kind} listens at {address}, not a drafter; give the address of a drafter, or start one at a free "
            "address: ssd-drafter serve --listen ADDRESS"
        )
        assert messages(address) == (expected, expected)
        with pytest.raises(AbsentError) as raised:
            check_address(address)
        assert str(raised.value) == expected


@pytest.mark.parametrize("answer", [b"", b"\x15\x03\x01\x00\x02\x02\x16", b"\x00\x00\x12\x04\x00\x00\x00\x00\x00"])
def test_a_server_that_may_be_a_drafter_is_not_said_to_be_another_one(answer):
    with answering(answer) as address:
        check_address(address)
        if not answer:  # As a server with TLS.
            assert all("if it uses TLS, give its CA" in message for message in messages(address))
