"""`ssd-engine serve`."""

from __future__ import annotations

import asyncio

import click

from engine.api.serve import serve
from engine.api.settings import EngineOptions, ServerConfig
from engine.build import SHIPPED_MODEL


def run_server(options: EngineOptions, config: ServerConfig, name: str | None) -> None:
    """Serve until a signal. Raises UserError."""
    called = name or (options.model or SHIPPED_MODEL).resolve().name
    asyncio.run(serve(options, config, called, click.echo))
