"""`ssd-engine serve`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from engine.api.serve import serve
from engine.api.settings import ServerConfig
from engine.commands.options import EngineOptions


def run_server(model: str | None, name: str | None, config: ServerConfig, **engine: Any) -> None:
    """Serve until a signal. `engine`: further fields of `EngineOptions`. Raises UserError."""
    options = EngineOptions.of(model, **engine)
    # A hub's model lies in a folder that is called after its revision.
    called = name or (options.model.resolve().name if model is None or Path(model).exists() else model)
    asyncio.run(serve(options, config, called, click.echo))
