"""Options of the commands that read logs: which files, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from drafter_service.ingest.files import File

F = TypeVar("F", bound=Callable[..., Any])


def source_options(command: F) -> F:
    """Add `sources`, `more_sources`, `tokenizer` and `fields` to a command."""
    options = (
        click.option(
            "--from",
            "sources",
            required=True,
            multiple=True,
            metavar="PATH_OR_URL...",
            help="Files, folders, globs or URLs (s3://, gs://, https://): JSON lines and Parquet logs, plain text and "
            "source trees, token arrays (.npy, .npz), snapshots; .gz and .zst, too.",
        ),
        click.argument("more_sources", nargs=-1, metavar=""),
        click.option(
            "--tokenizer",
            type=click.Path(path_type=Path, exists=True, file_okay=False),
            help="Folder of the target model; needed for text.",
        ),
        click.option(
            "--field",
            "fields",
            multiple=True,
            metavar="NAME",
            help="Field or column to read, such as answer or meta.answer; if repeated, the last one is the output and "
            "the others are its prompt.  [default: known names]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def find_sources(sources: Sequence[str]) -> list[File]:
    """Return the files of paths and URLs. Raises UserError if one cannot be read, or a package for it is missing."""
    from drafter_service.ingest.files import check_codecs, list_files
    from drafter_service.ingest.parquet import check_parquet

    files = list_files(sources)
    check_codecs(files)
    if any(file.suffix == ".parquet" for file in files):
        check_parquet()
    return files
