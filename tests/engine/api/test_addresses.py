"""Addresses at which a server cannot listen."""

import asyncio
import errno
import os
import socket
from dataclasses import fields

import pytest

from engine.api import serve
from engine.api.settings import ServerConfig
from engine.commands.options import EngineOptions
from ssd.errors import UserError

FIELDS = [field.name for field in fields(EngineOptions) if field.name != "model"]


def failing(number):
    def bind(_, __):
        raise OSError(number, os.strerror(number))

    return bind


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EADDRINUSE, "the port is in use"),
        (errno.EADDRNOTAVAIL, "no address of this machine"),
        (errno.EACCES, "may not listen there"),
        (errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT)),
    ],
)
def test_each_reason_has_its_words(monkeypatch, number, said):
    monkeypatch.setattr(socket.socket, "bind", failing(number))
    with pytest.raises(UserError, match=f"cannot listen at 127.0.0.1:80: .*{said}"):
        serve.bound("127.0.0.1", 80)


def test_a_port_that_is_taken_is_said_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr(serve, "EngineProcess", lambda _: pytest.fail("an engine was made"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = EngineOptions.of(None, **dict.fromkeys(FIELDS))
        config = ServerConfig(port=taken.getsockname()[1])
        with pytest.raises(UserError, match="the port is in use"):
            asyncio.run(serve.serve(options, config, "m", print))


def test_an_address_of_another_machine_is_no_port_in_use():
    # Set aside for documents: nobody's own.
    with pytest.raises(UserError, match="no address of this machine"):
        serve.bound("192.0.2.1", 0)
