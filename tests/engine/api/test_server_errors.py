"""Addresses on which a server cannot listen."""

import asyncio
import errno
import os
import socket
from dataclasses import fields, replace

import pytest

from engine.api import server
from engine.api.tools.formats import FORMATS
from engine.commands.options import EngineOptions, ServerConfig
from engine.models.shipped import SHIPPED_MODEL
from ssd.errors import UserError

OPTIONS = EngineOptions(**dict.fromkeys(field.name for field in fields(EngineOptions)))


def failing(number):
    def bind(_, __):
        raise OSError(number, os.strerror(number))

    return bind


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EADDRINUSE, "the port is in use"),
        (errno.EADDRNOTAVAIL, "does not have that address"),
        (errno.EACCES, "may not listen on that port"),
        (errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT)),
    ],
)
def test_each_bind_error_has_its_own_advice(monkeypatch, number, advice):
    monkeypatch.setattr(socket.socket, "bind", failing(number))
    with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:80: .*{advice}"):
        server.bind("127.0.0.1", 80)


def test_a_port_in_use_is_reported_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr(server, "EngineProcess", lambda _: pytest.fail("an engine was made"))
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        config = ServerConfig(port=occupied.getsockname()[1])
        with pytest.raises(UserError, match="the port is in use"):
            asyncio.run(server.serve(OPTIONS, config, "m", print))


def test_a_parser_of_tool_calls_needs_a_chat_template_with_tools(monkeypatch):
    monkeypatch.setattr(server, "EngineProcess", lambda _: pytest.fail("an engine was made"))
    config = ServerConfig(port=0, tool_call_parser="hermes")
    with pytest.raises(UserError, match=r"--tool-call-parser: the chat template of .*stdlib-7m does not use tools"):
        asyncio.run(server.serve(replace(OPTIONS, model=SHIPPED_MODEL, loras={}), config, "m", print))


def test_the_format_of_tool_calls_is_that_of_the_chat_template_unless_it_is_given(tmp_path):
    assert server._tool_format(tmp_path, None) is None
    (tmp_path / "chat_template.jinja").write_text("{{ tools }}<tool_call>")
    assert server._tool_format(tmp_path, None) is FORMATS["hermes"]
    assert server._tool_format(tmp_path, "mistral") is FORMATS["mistral"]
    (tmp_path / "chat_template.jinja").write_text("<tool_call>")
    assert server._tool_format(tmp_path, None) is None


def test_an_address_of_another_machine_is_not_called_in_use():
    # 192.0.2.0/24 is reserved for documentation.
    with pytest.raises(UserError, match="does not have that address"):
        server.bind("192.0.2.1", 0)
