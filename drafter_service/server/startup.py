"""Start the service: listen, compile or load the kernels, load namespaces, and serve until a signal.

The modules with kernels are imported in a thread, so that health checks are answered while they are compiled.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from drafter_service.replication.redis_stream import connect
from drafter_service.server.disk import in_thread
from drafter_service.server.listener import Listener
from drafter_service.settings.tree import ServiceConfig

if TYPE_CHECKING:  # It imports numba.
    from drafter_service.server.server import DrafterServer


async def run_service(
    config: ServiceConfig, notify: Callable[[str], None], ready: Callable[[str], None]
) -> DrafterServer:
    """Serve until SIGINT or SIGTERM, and return the stopped server. Raises UserError if it cannot start.

    notify: called with lines about the progress of compiling kernels, from another thread. ready: called with the
    address once streams are accepted.
    """
    if config.log.url is not None:
        connect(config.log.url)  # Raises UserError before the kernels are compiled.
    listener = Listener(config)
    await listener.start()

    try:
        module = await _load_server(listener, notify)
        # Until here the default handlers end the process at once: a thread that compiles cannot be stopped.
        stopping = _stop_event()
        listener.state = "loading namespaces"
        server: DrafterServer = module.DrafterServer(config, listener)
        await server.start()
    except BaseException:
        await listener.stop(None)
        raise
    ready(listener.address.text)
    await stopping.wait()
    await server.stop()
    return server


def _stop_event() -> asyncio.Event:
    """Return an event that SIGINT and SIGTERM set."""
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


async def _load_server(listener: Listener, notify: Callable[[str], None]) -> ModuleType:
    """Import the module of the server, and with it all kernels, in a thread that does not outlive the process."""

    def load_kernels() -> ModuleType:
        from ssd.kernels.progress import ProgressLines, watched_compilation

        lines = ProgressLines(notify)

        def report(percent: int) -> None:
            listener.state = f"compiling kernels, {percent} %"
            lines(percent)

        with watched_compilation(report):
            from drafter_service.server import server
        # A full garbage collection stops all streams. Traversing the modules and kernels takes 70 to 430 ms, and frees
        # nothing, so they are left out of all later ones.
        gc.collect()
        gc.freeze()
        return server

    return await in_thread(load_kernels)
