"""Run `ssd-engine serve`: start the engine process, create the application, listen, and shut down.

The HTTP process does not import PyTorch.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from drafter_service.client.chat_template import load_chat_template
from drafter_service.observability.process import own_version
from engine.api.app import create_app
from engine.api.engine_process import EngineProcess
from engine.api.errors import ApiError, error_response
from engine.api.middleware import REQUEST_ID
from engine.api.service import ServedModel, Service
from engine.api.tool_formats import FORMATS, ToolFormat, recognize
from engine.commands.options import EngineOptions, ServerConfig
from engine.models.folders import load_generation_defaults
from engine.models.tokenizer import ChatPrompts, Tokenizer
from ssd.errors import UserError

if TYPE_CHECKING:
    from engine.engine import Engine

DRAIN_S = 30
"""Seconds to wait for running requests after a signal to stop; a second signal aborts them. Kubernetes' default."""
BACKLOG = 2048
"""Length of the queue of connections that are not accepted yet: uvicorn's default."""
ABORT_S = 1.0
"""Longest time for aborted requests to report the engine's end to their clients."""


async def serve(options: EngineOptions, config: ServerConfig, name: str, notify: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. Raises UserError if the server cannot start or the engine process ends by
    itself."""
    bound = bind(config.host, config.port)  # Fail before loading a large model.
    if name in options.loras:
        raise UserError(f"--lora {name}: the model has this name; give the adapter or the model (--name) another one")
    if config.answer_repeats and {"ssd", "classic"}.isdisjoint(options.drafters):
        raise UserError("--answer-repeats needs the corpus of --drafter ssd in this process; choose ssd or ssd+OTHER")
    folder = options.folder
    keys = frozenset[str]() if config.api_keys is None else read_keys(config.api_keys)
    form = find_tool_format(folder, config.tool_call_parser)
    shown = () if form is None else form.markers
    tokenizer = Tokenizer(folder, shown)
    served = ServedModel(
        name=name,
        tokenizer=tokenizer,
        chat=ChatPrompts(folder, tokenizer),
        defaults=load_generation_defaults(folder).sampling,
        created=int(time.time()),
        drafter=options.drafter,
        adapters=tuple(options.loras),
        tool_format=form,
        answers_repeats=config.answer_repeats,
    )
    engine = EngineProcess(partial(build_engine_from, options, shown))
    loading = _LoadingApp()
    server = _uvicorn_server(_with_cors(loading, config.cors_origins))
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    notify(f"loading {name} ...; requests to {_url_of(bound)} are answered with status 503 until then")
    try:
        ready = await engine.start()
        with closing(Service(engine, ready, served, options.max_sequences + config.max_waiting)) as service:
            loading.loaded = create_app(
                service, keys=keys, max_body_bytes=config.max_body_bytes, version=own_version(),
                allow_weight_updates=config.allow_weight_updates,
            )  # fmt: skip
            _stop_on_signals(server, notify)
            notify(f"context window: {ready.window}")
            notify(f"serving at {_url_of(bound)}")
            ended = asyncio.create_task(engine.wait_for_end())
            await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            server.should_exit = True
            await serving
        if engine.gone is not None:
            raise UserError(f"the engine has stopped: {engine.gone}")
    finally:
        server.should_exit = True
        await serving
        await engine.stop()
        if server.server_state.tasks:  # Requests that a second signal aborts; they report the engine's end.
            await asyncio.wait(server.server_state.tasks, timeout=ABORT_S)


def find_tool_format(folder: Path, name: str | None) -> ToolFormat | None:
    """Return the format of a model's tool calls; None if it is not known. Raises UserError."""
    template = load_chat_template(folder)
    source = "" if template is None else template.tool_source
    if name is None:
        return recognize(source)
    if not source:
        raise UserError(f"--tool-call-parser: the chat template of {folder} does not use tools")
    return FORMATS[name]


def build_engine_from(options: EngineOptions, shown: tuple[str, ...]) -> Engine:
    """Build the engine; runs in the engine process. shown: special tokens that texts include, see `Tokenizer`.

    Raises UserError for a model or drafter that cannot be used.
    """
    from ssd.kernels.progress import ENGINE_WORK, ProgressLines, watched_compilation  # Imports numba.

    def warn(text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)

    notify = partial(print, flush=True)
    with watched_compilation(ProgressLines(notify), ENGINE_WORK):
        from engine.commands.launch import launch, load  # Imports PyTorch.

        engine = launch(load(options), Tokenizer(options.folder, shown), options, warn, notify)
    engine.prepare_grammars()
    return engine


def read_keys(path: Path) -> frozenset[str]:
    """Return the keys in a file, one per line; lines that start with # are comments. Raises UserError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"--api-keys: cannot read {path}: {getattr(problem, 'strerror', None) or problem}") from None
    keys = frozenset(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise UserError(f"--api-keys: {path} has no key; write one key per line")
    return keys


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens; connections wait until somebody accepts them. Raises UserError."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen()
    except OSError as problem:
        bound.close()
        advice = "give another --port, 0 for a free one, or another --host, 0.0.0.0 for all addresses"
        raise UserError(f"cannot listen on {host}:{port}: {problem.strerror}; {advice}") from None
    return bound


def _url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://{host}:{port}"


class _LoadingApp:
    """Application that answers requests with status 503 until the model is loaded, and then passes them on."""

    def __init__(self) -> None:
        self.loaded: ASGIApp | None = None
        """The application of the loaded model."""
        self._began = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        app = self.loaded
        if app is None:
            seconds = time.monotonic() - self._began
            app = error_response(ApiError(503, f"the model has been loading for {seconds:.0f} s; try again later"))
        # uvicorn prints the traceback of a request that is cancelled at the end, and a line if it only ends early.
        with suppress(asyncio.CancelledError):
            await app(scope, receive, send)


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return an application whose responses, errors included, browsers pass on to web pages of these origins."""
    if not origins:
        return app
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=[REQUEST_ID, "retry-after"]
    )


def _uvicorn_server(app: ASGIApp) -> uvicorn.Server:
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=DRAIN_S, server_header=False,
        lifespan="off", backlog=1,
    )  # fmt: skip
    return _UvicornServer(settings)


def _stop_on_signals(server: uvicorn.Server, notify: Callable[[str], None]) -> None:
    """Let the first SIGINT or SIGTERM stop the server, and the second one abort its requests."""

    def stop() -> None:
        server.force_exit, server.should_exit = server.should_exit, True
        # Last, because printing fails if nobody reads the output any more.
        if server.force_exit:
            notify("stopping at once")
        elif server.server_state.tasks:
            notify(f"waiting up to {DRAIN_S} s for running requests")
        else:
            notify("stopping")

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)


class _UvicornServer(uvicorn.Server):
    """uvicorn server that leaves signal handling to the event loop, and survives a lack of descriptors.

    Without free descriptors asyncio makes, logs and repeats as many attempts to accept as uvicorn's `backlog`, and each
    repetition multiplies them. So that is 1, and the queue of the sockets is made longer afterwards.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers; uvicorn would raise the signal again after a normal shutdown."""
        yield
