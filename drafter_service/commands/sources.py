"""Options of the commands that read logs: which files, and how; and what is shown of their contents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from drafter_service.observability.pages.units import printable
from drafter_service.settings.flags import Flag, takes
from ssd.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from drafter_service.ingest.documents import Faults, Part
    from drafter_service.ingest.files import File
    from drafter_service.ingest.reading import Reading

EXCERPT_CHARS = 70


@dataclass(frozen=True)
class SourceFlags:
    """Which logs are read, and how."""

    sources: Annotated[tuple[str, ...], Flag("--from", "PATH_OR_URL...")]
    """Files, folders, globs, URLs (s3://, gs://, https://), pipes, or - for standard input: logs as JSON, CSV, Parquet
    or Arrow, source code, token arrays (.npy, .npz), snapshots; compressed, too."""
    tokenizer: Path | None = None
    """Folder of the target model, with its tokenizer.json, or its GGUF file; needed for text."""
    fields: Annotated[tuple[str, ...], Flag("--field", "PATH")] = ()
    """Field or column to read, such as answer, meta.answer, choices[].text (of all elements), choices.0.text, or
    turns[].content; it may be a message or a list of messages, too. If repeated, the last one is the output and the
    others are its prompt.  [default: known formats]"""
    text: bool = False
    """Read every file as text, and learn all of it, whatever its format; needed for prose, such as documentation."""
    dry_run: bool = False
    """Read everything, show what is found and what would be skipped, and stop. Needs no service. Ctrl-C shows what was
    found so far."""
    quiet: bool = False
    """Show no excerpts of what is found."""

    def reading(self, more: tuple[str, ...], *, for_replay: bool = False) -> tuple[list[File], Reading]:
        """Return the files, `more` included, and how they are read. Raises UserError."""
        from drafter_service.ingest.files import list_files
        from drafter_service.ingest.reading import Reading, Vocabulary

        files = list_files((*self.sources, *more))
        vocabulary = Vocabulary(self.tokenizer) if self.tokenizer else None
        return files, Reading(vocabulary, self.fields, for_replay=for_replay, as_text=self.text)


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `given`, a `SourceFlags`, and `more_sources` to a command."""
    return takes(SourceFlags, "given")(click.argument("more_sources", nargs=-1, metavar="")(command))


def preview(files: Sequence[File], reading: Reading, *, quiet: bool) -> None:
    """Read all files, and print what is found and what is skipped. Raises UserError if there is no document."""
    from rich.console import Console
    from rich.progress import Progress

    from drafter_service.ingest.containers import read_batches

    note = "nothing was learned: this was a dry run"
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading", total=sum(file.size for file in files) or None)
        try:
            for batch in read_batches(files, reading):
                progress.update(task, completed=batch.bytes_read)
        except KeyboardInterrupt:
            note = "interrupted; this was found so far"
    if not reading.samples:
        raise UserError(f"no documents were found: {reading.faults.summary or 'the files are empty'}")
    console = Console()
    for text in [] if quiet else new_excerpts(reading, set()):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"files: {listed(reading.kinds)}\ndocuments: {listed(counts_of(reading))}\n{note}", markup=False)
    if reading.note:
        console.print(f"note: {reading.note}", markup=False)
    if reading.faults.by_reason:
        console.print(skipped_table(reading.faults))


def counts_of(reading: Reading) -> Counter[str]:
    """Return the number of documents by format."""
    return Counter({name: sample.documents for name, sample in reading.samples.items()})


def listed(counts: Counter[str]) -> str:
    """Return counts as a text, such as "3 JSON lines, 1 Parquet"."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.most_common())


def skipped_table(faults: Faults) -> Table:
    """Return a table of the reasons for which records and files were skipped."""
    from rich.markup import escape
    from rich.table import Column, Table

    table = Table(Column("skipped", overflow="fold"), "count", Column("first at", overflow="fold"))
    for reason, fault in faults.by_reason.items():
        table.add_row(escape(printable(reason)), f"{fault.count:,}", escape("\n".join(map(printable, fault.places))))
    return table


@contextmanager
def shown_progress(
    files: Sequence[File], reading: Reading, last_stage: str = "reading", *, quiet: bool
) -> Iterator[tuple[Progress, Callable[[int, int], None]]]:
    """Show a progress bar and, unless `quiet`, excerpts of each format as soon as it is known, on standard error.

    Yields the bar, and what a load calls after each batch. last_stage: what is done once all bytes are read.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    total, shown = sum(file.size for file in files), set[str]()
    columns = (BarColumn(20), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.fields[speed]}"))
    with Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("reading", total=total or None, speed="")

        def watch(bytes_read: int, tokens: int) -> None:
            speed = f"{tokens / (progress.tasks[task].elapsed or 1e-9):,.0f} tokens/s"
            stage = last_stage if total and bytes_read >= total else "reading"
            progress.update(task, completed=bytes_read, speed=speed, description=stage)
            for text in [] if quiet else new_excerpts(reading, shown):
                progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

        yield progress, watch


def new_excerpts(reading: Reading, shown: set[str]) -> Iterator[str]:
    """Yield what is taken as outputs, for each format that is not in `shown`, and add these formats to it."""
    for name, sample in list(reading.samples.items()):
        if name not in shown:
            shown.add(name)
            excerpts = "".join(f"\n    {_excerpt(output, reading)}" for output in sample.outputs)
            first = printable(f"{sample.first.place} (name {sample.first.name})")
            yield f"{name}, from {first}: {sample.documents:,} documents found, with outputs such as{excerpts}"


def _excerpt(output: Part, reading: Reading) -> str:
    if not isinstance(output, str):
        output = reading.vocabulary.decode(output) if reading.vocabulary else f"token ids {output.tolist()}"
    text = printable(" ".join(output.split()))
    return text if len(text) <= EXCERPT_CHARS else f"{text[:EXCERPT_CHARS]}..."
