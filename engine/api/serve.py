"""A server from its beginning to its end: the engine's process, the application, the port."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvicorn

from engine.api.admission import Admission
from engine.api.app import create_app
from engine.api.build import build
from engine.api.cache import ResponseCache
from engine.api.process import EngineProcess
from engine.api.service import SAMPLING, Served, Service
from engine.api.settings import ServerConfig, read_keys
from engine.commands.options import EngineOptions
from engine.models.chat import ChatPrompts
from engine.models.generation import load_generation_defaults
from engine.models.tokenizer import Tokenizer
from ssd.errors import UserError

OBSTACLES = {
    errno.EADDRINUSE: "the port is in use; give another --port, or 0 for a free one",
    errno.EADDRNOTAVAIL: "that is no address of this machine; give one of its own to --host, or 0.0.0.0 for all",
    errno.EACCES: "this user may not listen there; give a --port from 1024 on",
}


async def serve(engine_options: EngineOptions, config: ServerConfig, name: str, say: Callable[[str], None]) -> None:
    """Serve until a signal. Raises UserError if it cannot, or the engine has ended by itself."""
    bound(config.host, config.port).close()  # It would be a pity to say so after a large model has been loaded.
    folder = engine_options.model
    keys = frozenset[str]() if config.api_keys is None else read_keys(config.api_keys)
    tokenizer = Tokenizer(folder)
    served = Served(
        name=name,
        tokenizer=tokenizer,
        chat=ChatPrompts(folder, tokenizer),
        defaults=_sampling_defaults(folder),
        created=int(time.time()),
        drafter=engine_options.drafter,
        prefix_cache=engine_options.prefix_cache,
    )
    engine = EngineProcess(partial(build, engine_options))
    say(f"loading {name} ...")
    try:
        ready = await engine.start()
        admission = Admission(engine_options.max_sequences + config.max_waiting)
        cache = ResponseCache(config.cached_responses) if config.cached_responses else None
        service = Service(engine, ready, served, admission, cache)
        app = create_app(service, keys=keys, max_body_bytes=config.max_body_bytes, version=version("ssd-drafter"))
        await _listen(app, engine, config, say)
        if engine.gone is not None:
            raise UserError(f"the engine has stopped: {engine.gone}")
    finally:
        await engine.stop()


def _sampling_defaults(folder: Path) -> dict[str, Any]:
    """What the model's publisher recommends, by the names of `SamplingParams`."""
    recommended = asdict(load_generation_defaults(folder))
    return {name: value for name, value in recommended.items() if name in SAMPLING and value is not None}


async def _listen(app: Any, engine: EngineProcess, config: ServerConfig, say: Callable[[str], None]) -> None:
    settings = uvicorn.Config(
        app, host=config.host, port=config.port, log_level="warning", access_log=False,
        timeout_graceful_shutdown=int(config.drain_s), server_header=False, lifespan="off",
    )  # fmt: skip
    sockets = [bound(config.host, config.port)]
    host, port = sockets[0].getsockname()[:2]
    server = _Server(settings, lambda: say(f"serving at http://{host}:{port}"))

    def stop() -> None:
        say("stopping at once" if server.should_exit else f"letting requests end, up to {config.drain_s:g} s")
        server.force_exit, server.should_exit = server.should_exit, True

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)

    async def watch() -> None:
        await engine.wait_for_end()
        server.should_exit = True

    watching = asyncio.create_task(watch())
    try:
        await server.serve(sockets=sockets)
    finally:
        watching.cancel()


class _Server(uvicorn.Server):
    """Says when it listens, and does not raise a signal again once everything has ended in good order."""

    def __init__(self, settings: uvicorn.Config, listening: Callable[[], None]) -> None:
        super().__init__(settings)
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self._listening()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing is captured here: the event loop has the handlers."""
        yield


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address, which does not listen yet. Raises UserError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as problem:
        listener.close()
        why = OBSTACLES.get(problem.errno or 0, problem.strerror)
        raise UserError(f"cannot listen at {host}:{port}: {why}") from None
    return listener
