"""`ssd-drafter conformance`: check that an engine, or a service, follows the protocol."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any

import click
from annotated_types import Interval

from drafter_service.commands.link import AccessFiles, Link
from drafter_service.settings.flags import Flag, FlagCommand, takes
from ssd.errors import UserError


@dataclass(frozen=True)
class ConformanceFlags:
    """Which side is checked."""

    listen: Annotated[str | None, Flag(metavar="ADDRESS")] = None
    """Pretend to be the service at this address, and check an engine."""
    connect: Annotated[str | None, Flag(metavar="ADDRESS")] = None
    """Check the service at this address."""
    idle: Annotated[float, Interval(gt=0), Flag(metavar="SECONDS")] = 60.0
    """End --listen after this time without a request."""
    overlapped: bool = False
    """The engine requests drafts while a step is in flight (--listen)."""
    namespace: str | None = None
    """Namespace for the text of --connect.  [default: a new one]"""


@click.command(cls=FlagCommand)
@takes(ConformanceFlags)
@takes(AccessFiles, "access")
def conformance(options: ConformanceFlags, access: AccessFiles) -> None:
    """Check that an engine or a service follows the protocol.

    docs/integrating.md describes it. The outcome of each check is printed. The exit code is 0 if all have passed, 1
    otherwise.
    """
    listen, connect = options.listen, options.connect
    if (listen is None) == (connect is None):
        raise UserError("give one of --listen ADDRESS, to check an engine, and --connect ADDRESS, to check a service")
    if listen is not None:
        checks = _check_engine(listen, options.idle, is_overlapped=options.overlapped)
    else:
        from drafter_service.commands.conformance.service_side import check_service

        link = Link(**vars(access), address=str(connect))
        checks = check_service(link.connector(), options.namespace or "")
    for line in checks.lines:
        click.echo(line)
    sys.exit(1 if checks.failures else 0)


def _check_engine(listen: str, idle_s: float, *, is_overlapped: bool) -> Any:
    import asyncio

    from drafter_service.commands.conformance.checks import RUN_AGAIN
    from drafter_service.commands.conformance.engine_side import EngineChecker
    from drafter_service.commands.conformance.simulated_service import run_engine_checks
    from drafter_service.transport.address import Address

    def announce(address: str) -> None:
        click.echo(f"listening at {address}; let the engine use it as its drafter, and {RUN_AGAIN}, 7 times in all")

    checker = EngineChecker(is_overlapped=is_overlapped)
    try:
        asyncio.run(run_engine_checks(Address.parse(listen), checker, idle_s, announce))
    except KeyboardInterrupt:
        checker.conclude()
    return checker.checks
