"""`ssd-drafter warm`: a load behind a progress bar. What it needs is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from drafter_service.commands.connection import Link, connection_options
from drafter_service.settings.quantity import Quantity
from ssd.errors import UserError

if TYPE_CHECKING:
    from drafter_service.ingest.files import File
    from drafter_service.ingest.pipeline import Summary
    from drafter_service.ingest.reading import Reading
    from drafter_service.ingest.resume import Resume
    from drafter_service.ingest.sink import Sink


@click.command()
@click.option(
    "--from",
    "sources",
    required=True,
    multiple=True,
    metavar="PATH_OR_URL...",
    help="Files, folders, globs or URLs (s3://, gs://, https://): JSON lines and Parquet logs, plain text and source "
    "trees, token arrays (.npy, .npz, .bin), snapshots; .gz, .zst, .bz2 and .xz too.",
)
@click.argument("more_sources", nargs=-1, metavar="")
@click.option("--snapshot", type=click.Path(path_type=Path, dir_okay=False), help="Learn into this snapshot.")
@click.option("--capacity", type=Quantity(), help="Tokens that the snapshot remembers.  [default: 16M]")
@click.option(
    "--namespace",
    metavar="NAME",
    help="Learn into this namespace of the running service.  [default: that of engines with the model in --tokenizer]",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of the model whose tokens are drafted; needed for text.",
)
@click.option(
    "--field",
    "fields",
    multiple=True,
    metavar="NAME",
    help="Field or column to learn, such as answer or meta.answer; given several times, the last is the output and "
    "those before it its prompt.  [default: the usual ones]",
)
@click.option("--whole-prompts", is_flag=True, help="Learn prompts whole, and not only the end of each.")
@click.option(
    "--resume",
    "resume_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep in this file how far the load came; the same command goes on from there.",
)
@connection_options
def warm(
    sources: tuple[str, ...],
    more_sources: tuple[str, ...],
    snapshot: Path | None,
    capacity: int | None,
    namespace: str | None,
    tokenizer: Path | None,
    fields: tuple[str, ...],
    whole_prompts: bool,
    resume_path: Path | None,
    link: Link,
) -> None:
    """Learn from logs and text, so that the first requests are drafted for already."""
    from drafter_service.ingest.files import check_codecs, list_files
    from drafter_service.ingest.parquet import check_parquet
    from drafter_service.ingest.reading import Reading
    from drafter_service.ingest.vocabulary import Vocabulary

    files = list_files((*sources, *more_sources))
    check_codecs(files)
    if any(file.suffix == ".parquet" for file in files):
        check_parquet()
    vocabulary = Vocabulary(tokenizer) if tokenizer else None
    reading = Reading(vocabulary, fields, whole_prompts)
    if snapshot is not None and namespace is not None:
        raise UserError("give --snapshot FILE or --namespace NAME of a running service, not both")
    if snapshot is None and namespace is None and tokenizer is None:
        raise UserError("say where to: --snapshot FILE, --namespace NAME, or --tokenizer FOLDER of the engines' model")
    if snapshot is not None:
        sink, resume = _into_snapshot(snapshot, capacity, resume_path)
    elif capacity is not None:
        raise UserError("--capacity is for --snapshot; the service has its own")
    else:
        sink, resume = _into_service(link, namespace, tokenizer, resume_path)
    try:
        summary = _load(files, reading, sink, resume)
    except KeyboardInterrupt:
        raise UserError(
            "interrupted; the same command goes on from what was saved last"
            if resume.is_kept
            else "interrupted; with --resume FILE a load can go on where it stopped"
        ) from None
    _show(summary, vocabulary.chat.note if vocabulary and vocabulary.chat.was_missed else None)
    if summary.faults.by_reason and not summary.learned.documents and not summary.learned.duplicates:
        raise UserError("nothing could be learned: the table says why; accepted forms are in docs/operations.md")


def _into_snapshot(snapshot: Path, capacity: int | None, resume_path: Path | None) -> tuple[Sink, Resume]:
    from drafter_service.ingest.offline import OfflineSink
    from drafter_service.ingest.resume import Resume

    resume = Resume(resume_path, str(snapshot.absolute()))
    if not resume.is_new and not snapshot.exists():
        raise UserError(f"--resume: {resume_path} goes on with {snapshot}, which is gone; remove it to begin anew")
    return OfflineSink(snapshot, capacity), resume


def _into_service(
    link: Link, namespace: str | None, tokenizer: Path | None, resume_path: Path | None
) -> tuple[Sink, Resume]:
    from drafter_service.client.identity import fingerprint, model_identity
    from drafter_service.ingest.remote import RemoteSink
    from drafter_service.ingest.resume import Resume
    from drafter_service.observability.facts import ModelIdentity
    from drafter_service.transport.messages import default_namespace

    if namespace is None:
        # Where an engine with this model drafts from, unless it says otherwise.
        model = model_identity(Path(str(tokenizer)))
        namespace = default_namespace(model)
    else:
        model = ModelIdentity(tokenizer=fingerprint(tokenizer) if tokenizer else "")
    click.echo(f"learning into the namespace {namespace}", err=True)
    resume = Resume(resume_path, f"the namespace {namespace} at {link.server}")
    return RemoteSink(link.connector(), namespace, model, link.told), resume


def _load(files: list[File], reading: Reading, sink: Sink, resume: Resume) -> Summary:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from drafter_service.ingest import pipeline

    total = sum(file.size for file in files)
    columns = (BarColumn(20), DownloadColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("reading", total=total or None, speed="")

        def watch(state: pipeline.Progress) -> None:
            seconds = progress.tasks[task].elapsed or 1e-9
            speed = f"{state.tokens / seconds:,.0f} tokens/s"
            stage = "sorting and saving" if total and state.bytes_read >= total else "reading"
            progress.update(task, completed=state.bytes_read, speed=speed, description=stage)

        return pipeline.load(files, reading, sink, resume, watch)


def _show(summary: Summary, note: str | None) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    console = Console()
    if note:
        console.print(f"note: {escape(note)}")
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in summary.kinds.most_common())
    learned = summary.learned
    table = Table("learned", "", show_lines=False)
    table.add_row("files", kinds or "none that was not read before")
    table.add_row("documents", f"{learned.documents:,}")
    table.add_row("tokens", f"{learned.tokens:,}")
    table.add_row("known already", f"{learned.duplicates:,} documents")
    table.add_row("time", f"{summary.seconds:.1f} s, {learned.tokens / summary.seconds:,.0f} tokens/s")
    console.print(table)
    if summary.faults.by_reason:
        left_out = Table("left out", "how often", Column("first at", overflow="fold"))
        for reason, fault in summary.faults.by_reason.items():
            left_out.add_row(reason, f"{fault.count:,}", escape("\n".join(fault.places)))
        console.print(left_out)
