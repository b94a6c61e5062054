"""A lack of file descriptors in an event loop's process, for tests of servers."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from contextlib import contextmanager

CONNECTIONS = 100
"""Number of connections that a queue must hold while none is accepted."""


@contextmanager
def no_free_descriptors(monkeypatch):
    """Let `accept` fail in the block, where asyncio tries again soon; yield an `asyncio.Event` that a failure sets, and
    the list of failures.
    """
    failures, failed = [], asyncio.Event()

    def fail(_):
        failures.append(True)
        failed.set()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(asyncio.constants, "ACCEPT_RETRY_DELAY", 0.02)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", fail)
        yield failed, failures


async def check_accepting(connect, monkeypatch):
    """Check that a server makes one attempt at a time to accept a connection without free descriptors, that others wait
    in its queue, and are accepted later.

    connect: returns a new connection, whose server sends something or closes it.
    """
    loop = asyncio.get_running_loop()
    with no_free_descriptors(monkeypatch) as (failed, failures):
        connections = [connect()]
        for attempts in (1, 2, 3):
            await failed.wait()
            assert len(failures) == attempts
            failed.clear()
        connections += [connect() for _ in range(CONNECTIONS)]
    for connection in connections:
        connection.setblocking(False)
        await loop.sock_recv(connection, 1)
        connection.close()
