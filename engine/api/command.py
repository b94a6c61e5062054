"""`ssd-engine serve`."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from engine.api.serve import serve
from engine.api.settings import EngineOptions, ServerConfig
from engine.models.hub import find_model
from engine.shipped import SHIPPED_MODEL


def run_server(model: str | None, name: str | None, config: ServerConfig, **engine: Any) -> None:
    """Serve until a signal. `engine`: further fields of `EngineOptions`. Raises UserError."""
    folder = find_model(model) if model else SHIPPED_MODEL
    called = name or (model if model and not folder.samefile(model) else folder.resolve().name)
    asyncio.run(serve(EngineOptions(folder, **engine), config, called, click.echo))
