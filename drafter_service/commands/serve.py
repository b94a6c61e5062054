"""`ssd-drafter serve`: run the service."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from drafter_service.commands.link import DEFAULT_ADDRESS
from drafter_service.settings.quantity import Quantity
from ssd.config import MAX_DRAFT

_FILE = click.Path(dir_okay=False, path_type=Path)

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


@click.command()
@click.option("--config", type=_FILE, help="TOML file with settings; flags and SSD_DRAFTER_... variables override it.")
@click.option("--listen", metavar="ADDRESS", help=f"unix:/path or host:port.  [default: {DEFAULT_ADDRESS}]")
@click.option("--capacity", type=Quantity(), help="Tokens that a namespace remembers.  [default: 16M]")
@click.option(
    "--max-draft",
    type=int,
    help=f"Maximum number of tokens in a draft; the drafters support up to {MAX_DRAFT}.  [default: 32]",
)
@click.option("--memory-limit", type=Quantity(), help="Maximum bytes of all loaded namespaces.  [default: 4G]")
@click.option(
    "--snapshot-folder", type=click.Path(file_okay=False, path_type=Path), help="Folder that stores the namespaces."
)
@click.option("--log", metavar="URL", help="Address of the log that replicas share, redis://...")
@click.option("--metrics", metavar="HOST:PORT", help="Address of the metrics for Prometheus.")
@click.option("--certificate", type=_FILE, help="The service's certificate; enables TLS.")
@click.option("--key", type=_FILE, help="Private key of --certificate.")
@click.option("--client-ca", type=_FILE, help="CAs of the callers' certificates, which are then required.")
@click.option("--callers", type=_FILE, help="TOML file with callers and their rights (see ssd-drafter token).")
@click.option("--allow-plaintext", is_flag=True, default=None, help="Listen on a network without TLS.")
@click.option("--socket-mode", metavar="OCTAL", help="Permissions of a Unix socket.  [default: 0600]")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="[default: info]")
@click.option("--log-format", type=click.Choice(["console", "json"]), help="[default: console]")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any setting, such as limits.streams=64.")
@click.option("--print-config", is_flag=True, help="Print all settings and their meanings as TOML, and exit.")
def serve(config: Path | None, settings: tuple[str, ...], print_config: bool, **flags: Any) -> None:
    """Serve drafts to engines until SIGINT or SIGTERM."""
    import asyncio

    from drafter_service.settings.load import load_settings, read_assignments
    from drafter_service.settings.printed import to_toml

    given = {FLAGS[name]: value for name, value in flags.items() if value is not None}
    tree = load_settings(config, read_assignments(settings) | given)
    if print_config:
        click.echo(to_toml(tree), nl=False)
        return
    from drafter_service.observability.logs import configure_logs
    from drafter_service.server.startup import run_service

    configure_logs(tree.reports.log_format, tree.reports.log_level)

    def announce(address: str) -> None:
        capacity = f"up to {tree.drafting.capacity:,} tokens per namespace"
        click.echo(f"drafter listening at {address}, {capacity}")

    server = asyncio.run(run_service(tree, partial(click.echo, err=True), announce))
    click.echo(server.summary)
