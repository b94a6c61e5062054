"""`ssd-drafter serve`: run the service."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from drafter_service.settings.flags import File, FlagCommand, Number, option, with_flags

FLAGS = {
    "listen": "listen",
    "capacity": "drafting.capacity",
    "max_draft": "drafting.max_draft",
    "memory_limit": "namespaces.memory_limit",
    "snapshot_folder": "snapshots.folder",
    "log": "log.url",
    "metrics": "reports.metrics",
    "certificate": "access.certificate",
    "key": "access.key",
    "client_ca": "access.client_ca",
    "callers": "access.callers",
    "allow_plaintext": "access.allow_plaintext",
    "socket_mode": "access.socket_mode",
    "log_level": "reports.log_level",
    "log_format": "reports.log_format",
}
"""Setting of each flag; the other settings have none. The value of a flag that is not given is None."""
SUFFIXED = ("capacity", "memory_limit")
"""Flags that are usually given with a suffix, such as 16M."""


def _setting_flags() -> list[click.Option]:
    """Return an option for each of `FLAGS`: its help is the first sentence of the setting's meaning."""
    from drafter_service.settings.tree import SETTINGS

    options = [option("config", File, "TOML file with settings; flags and SSD_DRAFTER_... variables override it.")]
    for name, key in FLAGS.items():
        setting = SETTINGS.settings[key]
        first, default = setting.meaning.partition(". ")[0].rstrip("."), setting.default
        shown = f"  [default: {default if isinstance(default, str) else f'{default:,}'}]" if default else ""
        options.append(option(name, Number if name in SUFFIXED else setting.kind, f"{first}.{shown}"))
    return options


@click.command(cls=FlagCommand)
@with_flags(_setting_flags)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any setting, such as limits.streams=64.")
@click.option("--print-config", is_flag=True, help="Print all settings and their meanings as TOML, and exit.")
def serve(config: Path | None, settings: tuple[str, ...], print_config: bool, **flags: Any) -> None:
    """Serve drafts to engines until SIGINT or SIGTERM."""
    import asyncio

    import structlog

    from drafter_service.settings.tree import SETTINGS, load_settings, read_assignments

    given = {FLAGS[name]: value for name, value in flags.items() if value is not None}
    tree = load_settings(config, read_assignments(settings) | given)
    if print_config:
        click.echo(SETTINGS.to_toml(tree), nl=False)
        return
    from drafter_service.observability.logs import configure_logs
    from drafter_service.server.startup import run_service

    configure_logs(tree.reports.log_format, tree.reports.log_level)
    if tree.snapshots.folder is None:
        logger = structlog.get_logger(__name__)
        logger.info("no snapshot folder: the corpus is lost when the service ends", advice="--snapshot-folder FOLDER")

    def announce(address: str) -> None:
        capacity = f"up to {tree.drafting.capacity:,} tokens per namespace"
        click.echo(f"drafter listening at {address}, {capacity}")

    server = asyncio.run(run_service(tree, partial(click.echo, err=True), announce))
    click.echo(server.summary)
