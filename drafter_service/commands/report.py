"""`ssd-drafter report`: what drafting has saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from drafter_service.commands.link import Link, connection_options
from drafter_service.observability.measuring.results import OWNER_ONLY, write
from drafter_service.settings.flags import FlagCommand
from ssd.errors import UserError

if TYPE_CHECKING:
    from drafter_service.observability.report.schema import Report

TIMEOUT_S = 10.0


@click.command(cls=FlagCommand)
@connection_options
@click.option("--namespace", default="", metavar="NAME", help="Report on this namespace only.", show_default=False)
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write an HTML page with charts.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON document that docs/report.schema.json describes.")
def report(link: Link, namespace: str, html: Path | None, as_json: bool) -> None:
    """Report the savings as tables, an HTML page or JSON."""
    made = fetch_report(link, namespace)
    if html is not None:
        from drafter_service.observability.report.page import render_page

        write(html, render_page(made), OWNER_ONLY)
        click.echo(f"wrote {html.absolute()}", err=True)
    if as_json:
        click.echo(made.model_dump_json(indent=2))
    elif html is None:
        from rich.console import Console

        from drafter_service.observability.report.terminal import print_report

        print_report(made, Console())


def fetch_report(link: Link, namespace: str = "") -> Report:
    """Return the report of one namespace, or of all that the caller may see.

    Raises UserError if there is none, and for one that this version cannot read.
    """
    from pydantic import ValidationError

    from drafter_service.observability.report.schema import SCHEMA_VERSION, Report
    from drafter_service.stubs import drafter_pb2 as pb

    with link.stub() as (stub, metadata):
        answer = stub.Report(pb.ReportRequest(namespace=namespace), timeout=TIMEOUT_S, metadata=metadata)
    try:
        return Report.model_validate_json(answer.json)
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "the document"
        raise UserError(
            f"{link.address} does not answer with a report of version {SCHEMA_VERSION}, which this ssd-drafter reads "
            f"({field}: {first['msg']}); use the ssd-drafter that runs there"
        ) from None
