"""`ssd-drafter report` and `ssd-drafter top`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from drafter_service.commands.connection import Link, connection_options
from ssd.errors import UserError


@click.command()
@connection_options
@click.option(
    "--snapshot", type=click.Path(path_type=Path), metavar="FILE", help="Of a snapshot instead of a running service."
)
@click.option("--namespace", default="", metavar="NAME", help="Only this one.", show_default=False)
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write a page with plots.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON document that docs/report.schema.json describes.")
@click.option("--passages", is_flag=True, help="With the texts that drafts came from most. They are users' text.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Show passages as text, by the tokenizer.json of this folder.",
)
def report(
    link: Link,
    snapshot: Path | None,
    namespace: str,
    html: Path | None,
    as_json: bool,
    passages: bool,
    tokenizer: Path | None,
) -> None:
    """Show what drafting was worth: tables here, a page, or JSON."""
    if snapshot is not None and (passages or namespace):
        raise UserError("a snapshot is of one namespace, without passages; leave --passages and --namespace out")
    if tokenizer is not None and not passages:
        raise UserError("--tokenizer is for the text of passages; say --passages too")
    if snapshot is None:
        from drafter_service.observability.report.remote import fetch_report

        made = fetch_report(link, namespace, passages)
    else:
        from drafter_service.observability.report.offline import stats_report

        made = stats_report(snapshot)
    if tokenizer is not None:
        from drafter_service.observability.report.passages import with_text

        made = with_text(made, tokenizer)
    if html is not None:
        from drafter_service.observability.report.page import render_page

        _write(html, render_page(made))
    if as_json:
        click.echo(made.model_dump_json(indent=2))
    elif html is None:
        from rich.console import Console

        from drafter_service.observability.report.terminal import print_report

        print_report(made, Console())


@click.command()
@connection_options
@click.option("--namespace", default="", metavar="NAME", help="Only this one.", show_default=False)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1, max=3600),
    default=1.0,
    metavar="SECONDS",
    help="How often it is drawn.",
)
@click.option("--once", is_flag=True, help="Print one interval and stop, as where there is no terminal.")
def top(link: Link, namespace: str, interval: float, once: bool) -> None:
    """Watch what a service does now; q quits."""
    from rich.console import Console

    from drafter_service.observability.report.keys import keys, wait_without_keys
    from drafter_service.observability.report.remote import fetch_report
    from drafter_service.observability.report.schema import Report
    from drafter_service.observability.report.top import print_once, watch

    def fetch() -> Report:
        return fetch_report(link, namespace)

    console = Console()
    if once or not console.is_terminal:
        print_once(fetch, console, wait_without_keys, interval)
        return
    try:
        with keys() as wait:
            watch(fetch, console, wait, interval)
    except KeyboardInterrupt:
        sys.exit(0)


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as problem:
        raise UserError(f"cannot write {path}: {problem.strerror}") from None
    click.echo(f"wrote {path}", err=True)
