"""The real server, started by its command, or in a thread of this process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import asynccontextmanager, contextmanager
from importlib import import_module

TIMEOUT_S = 60
SERVE = (sys.executable, "-m", "drafter_service.commands.main", "serve")


@contextmanager
def served(*arguments):
    """Run `ssd-drafter serve`; once it listens, yield its process, with its first output as `greeting` and its open log
    as `log`.
    """
    # A pipe holds 64 KiB: the service would wait for somebody to read its log.
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*SERVE, *arguments], stdout=subprocess.PIPE, stderr=log, text=True)
        process.log = log
        try:
            process.greeting = process.stdout.readline()
            assert "listening at" in process.greeting, os.pread(log.fileno(), 1 << 16, 0).decode()
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=TIMEOUT_S)


@asynccontextmanager
async def running(config):
    """Run the service in this event loop; yield its `DrafterServer` and its address."""
    from drafter_service.server.listener import Listener
    from drafter_service.server.server import DrafterServer

    listener = Listener(config)
    await listener.start()
    try:
        server = DrafterServer(config, listener)
        await server.start()
    except BaseException:
        await listener.stop(None)
        raise
    try:
        yield server, listener.address.text
    finally:
        await server.stop()


@contextmanager
def serving(**settings):
    """Run the service in a thread, for tests that need no process of its own; yield its address.

    settings: a part of those of a `ServiceConfig`.
    """
    from structlog.testing import capture_logs

    # It may compile kernels, which takes longer than a start may.
    import_module("drafter_service.server.server")
    from drafter_service.settings.tree import ServiceConfig

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    service = running(ServiceConfig(**settings))
    try:
        with capture_logs():  # Otherwise they would be printed to the output of commands that run here.
            _, address = asyncio.run_coroutine_threadsafe(service.__aenter__(), loop).result(TIMEOUT_S)
            try:
                yield address
            finally:
                asyncio.run_coroutine_threadsafe(service.__aexit__(None, None, None), loop).result(TIMEOUT_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(TIMEOUT_S)
