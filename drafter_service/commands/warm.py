"""`ssd-drafter warm`: learn from logs and text, with a progress bar."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from drafter_service.commands.link import Link, connection_options
from drafter_service.commands.sources import (
    SourceFlags,
    counts_of,
    listed,
    preview,
    shown_progress,
    skipped_table,
    source_options,
)
from drafter_service.settings.flags import File as FilePath
from drafter_service.settings.flags import Flag, FlagCommand, Number, takes
from ssd.errors import UserError

if TYPE_CHECKING:
    from drafter_service.ingest.documents import Sink, Totals
    from drafter_service.ingest.reading import Reading

IN_USE = (
    "--snapshot: a service uses {}, and its next save would replace what is learned; learn into the service with "
    "--namespace NAME, or stop it first"
)


@dataclass(frozen=True)
class WarmFlags:
    """What learns."""

    snapshot: FilePath | None = None
    """Learn into this snapshot file."""
    capacity: Number | None = None
    """Capacity of the snapshot in tokens.  [default: that of an existing snapshot, or 16M]"""
    namespace: Annotated[str | None, Flag(metavar="NAME")] = None
    """Learn into this namespace of the running service.  [default: that of engines with the model in --tokenizer]"""


@click.command(cls=FlagCommand)
@source_options
@takes(WarmFlags)
@connection_options
def warm(given: SourceFlags, more_sources: tuple[str, ...], options: WarmFlags, link: Link) -> None:
    """Learn from logs and text before the first requests."""
    from drafter_service.ingest import pipeline
    from drafter_service.server.store import exclusive_use, folder_of

    snapshot, namespace, tokenizer, quiet = options.snapshot, options.namespace, given.tokenizer, given.quiet
    capacity = options.capacity
    files, reading = given.reading(more_sources)
    if given.dry_run:
        preview(files, reading, quiet=quiet)
        return
    if snapshot is not None and namespace is not None:
        raise UserError("give --snapshot FILE or --namespace NAME of a running service, not both")
    if snapshot is None and namespace is None and tokenizer is None:
        raise UserError("give a destination: --snapshot FILE, --namespace NAME, or --tokenizer FOLDER of the target")
    if capacity is not None and snapshot is None:
        raise UserError("--capacity applies to --snapshot; a service has its own setting")
    with exclusive_use(None if snapshot is None else folder_of(snapshot), IN_USE):
        if snapshot is not None:
            from drafter_service.ingest.sinks import OfflineSink

            sink: Sink = OfflineSink(snapshot, capacity)
        else:
            sink = _into_service(link, namespace, tokenizer)
        try:
            began = time.perf_counter()
            with shown_progress(files, reading, "sorting and saving", quiet=quiet) as (_, watch):
                learned = pipeline.load(files, reading, sink, watch)
        except KeyboardInterrupt:
            kept = "nothing was saved" if snapshot else "the same command skips what the service has learned"
            raise UserError(f"interrupted; {kept}") from None
    _show(learned, sink.saved, time.perf_counter() - began, reading)


def _into_service(link: Link, namespace: str | None, tokenizer: Path | None) -> Sink:
    from drafter_service.client.identity import model_identity, tokenizer_identity
    from drafter_service.ingest.sinks import RemoteSink
    from drafter_service.observability.facts import ModelIdentity

    if namespace is None:
        # The service chooses the namespace that an engine with this model uses by default.
        model = model_identity(Path(str(tokenizer)))
    else:
        model = ModelIdentity() if tokenizer is None else tokenizer_identity(tokenizer)
    sink = RemoteSink(link.connector(), namespace or "", model, link.describe)
    click.echo(f"learning into the namespace {sink.state}", err=True)
    if advice := sink.state.advice("give --namespace {}"):
        click.echo(f"warning: {advice}", err=True)
    return sink


def _show(learned: Totals, saved: str, seconds: float, reading: Reading) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if reading.note:
        console.print(f"note: {reading.note}", markup=False)
    table = Table("learned", "", show_lines=False)
    table.add_row("files", listed(reading.kinds))
    table.add_row("documents found", listed(counts_of(reading)))
    table.add_row("documents", f"{learned.documents:,}")
    table.add_row("tokens", f"{learned.tokens:,}")
    table.add_row("documents already known", f"{learned.duplicates:,}")
    table.add_row("saved", escape(saved))
    table.add_row("time", f"{seconds:.1f} s, {learned.tokens / seconds:,.0f} tokens/s")
    console.print(table)
    if reading.faults.by_reason:
        console.print(skipped_table(reading.faults))
