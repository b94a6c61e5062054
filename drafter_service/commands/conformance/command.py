"""`ssd-drafter conformance`: check that an engine, or a service, follows the protocol."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from drafter_service.commands.link import Link, access_options
from ssd.errors import UserError


@click.command()
@click.option("--listen", metavar="ADDRESS", help="Pretend to be the service at this address, and check an engine.")
@click.option("--connect", metavar="ADDRESS", help="Check the service at this address.")
@click.option(
    "--idle",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    metavar="SECONDS",
    help="End --listen after this time without a request.",
)
@click.option("--overlapped", is_flag=True, help="The engine requests drafts while a step is in flight (--listen).")
@click.option(
    "--namespace", default="", help="Namespace for the text of --connect.  [default: a new one]", show_default=False
)
@access_options
def conformance(
    listen: str | None,
    connect: str | None,
    idle: float,
    overlapped: bool,
    namespace: str,
    ca: Path | None,
    certificate: Path | None,
    key: Path | None,
    token_file: Path | None,
) -> None:
    """Check that an engine or a service follows the protocol.

    docs/integrating.md describes it. The outcome of each check is printed. The exit code is 0 if all have passed, 1
    otherwise.
    """
    if (listen is None) == (connect is None):
        raise UserError("give one of --listen ADDRESS, to check an engine, and --connect ADDRESS, to check a service")
    if listen is not None:
        checks = _check_engine(listen, idle, is_overlapped=overlapped)
    else:
        checks = _check_service(Link(str(connect), ca, certificate, key, token_file), namespace)
    for line in checks.lines:
        click.echo(line)
    sys.exit(0 if checks.have_passed else 1)


def _check_engine(listen: str, idle_s: float, *, is_overlapped: bool) -> Any:
    import asyncio

    from drafter_service.commands.conformance.engine_side import RUN_AGAIN, EngineChecker
    from drafter_service.commands.conformance.listening import run_engine_checks
    from drafter_service.transport.address import Address

    def announce(address: str) -> None:
        click.echo(f"listening at {address}; let the engine use it as its drafter, and {RUN_AGAIN}, 7 times in all")

    checker = EngineChecker(is_overlapped=is_overlapped)
    try:
        asyncio.run(run_engine_checks(Address.parse(listen), checker, idle_s, announce))
    except KeyboardInterrupt:
        checker.conclude()
    return checker.checks


def _check_service(link: Link, namespace: str) -> Any:
    from drafter_service.commands.conformance.service_side import ServiceChecker

    return ServiceChecker(link.connector(), namespace).run()
