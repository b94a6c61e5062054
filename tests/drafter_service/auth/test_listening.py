"""Exposure of addresses, and permissions of Unix sockets."""

import os
import socket
import stat
from pathlib import Path

import grpc
import pytest

from drafter_service.auth.listening import check_exposure, listen
from drafter_service.settings.tree import AccessConfig
from drafter_service.transport.address import Address
from ssd.errors import UserError
from tests.drafter_service.guarded import run

TLS = {"certificate": Path("c"), "key": Path("k")}
LOCAL = ["127.0.0.1:1", "127.8.9.1:1", "[::1]:1", "localhost:1", "LOCALHOST:0", "unix:/run/ssd.sock"]
OPEN = ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1", "*:1", "0:1", "127.1:1", "localhost.example.org:1"]


@pytest.mark.parametrize("text", LOCAL)
def test_local_addresses_need_no_protection(text):
    assert Address.parse(text).is_local
    check_exposure(Address.parse(text), AccessConfig())


@pytest.mark.parametrize("text", OPEN)
def test_open_addresses_need_tls_and_callers(text):
    address = Address.parse(text)
    assert not address.is_local
    with pytest.raises(UserError, match="--allow-plaintext"):
        check_exposure(address, AccessConfig(callers=Path("f")))
    with pytest.raises(UserError, match="everybody there would have every right"):
        check_exposure(address, AccessConfig(**TLS))
    check_exposure(address, AccessConfig(allow_plaintext=True))
    check_exposure(address, AccessConfig(**TLS, callers=Path("f")))
    check_exposure(address, AccessConfig(**TLS, client_ca=Path("f")))


@pytest.mark.parametrize("text", ["::1:50051", "dns:///0.0.0.0:1", "ipv4:127.0.0.1:1", "[::1:1", "localhost:\u0661"])
def test_ambiguous_addresses_are_refused(text):
    with pytest.raises(UserError, match="is not an address"):
        Address.parse(text)


@run
async def test_every_spelling_of_an_address_can_be_bound(socket_address):
    for text in (socket_address, "127.0.0.1:0", "localhost:0", "[::1]:0"):
        listen(grpc.aio.server(), Address.parse(text), AccessConfig(allow_plaintext=True))


def test_an_address_of_another_machine_cannot_be_bound():
    with pytest.raises(UserError, match=r"cannot listen at .*: Cannot assign requested address; choose another"):
        Address.parse("192.0.2.1:1").check_bindable()


def test_the_host_of_an_address_must_resolve(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UserError, match=r"cannot listen at .*: Name or service not known; check the host"):
        Address.parse("nowhere.example:1").check_bindable()


def test_unix_socket_belongs_to_the_owner_from_the_start(socket_address):
    address = Address.parse(socket_address)
    before = os.umask(0)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            with address.permissions(0o666):
                listener.bind(str(address.socket_path))
                assert stat.S_IMODE(address.socket_path.stat().st_mode) == 0o600
            assert stat.S_IMODE(address.socket_path.stat().st_mode) == 0o666
        with pytest.raises(RuntimeError), address.permissions(0o600):
            raise RuntimeError
        assert os.umask(0) == 0
    finally:
        os.umask(before)
