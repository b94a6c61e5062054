"""Files that commands write."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ssd.errors import UserError

OWNER_ONLY = 0o600
"""Permissions of pages: names of namespaces and models in them may be those of customers."""


def check_writable(path: Path) -> None:
    """Raise UserError if a file cannot be written. Its contents do not change.

    Commands that work for minutes call this before they begin.
    """
    from drafter_service.observability.measuring.results import try_writing

    try:
        try_writing(path)
    except OSError as problem:
        raise _failure(path, problem) from None


def write(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file and print its path to standard error; mode: permissions of a new file, before the umask.

    Raises UserError.
    """
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as problem:
        raise _failure(path, problem) from None
    click.echo(f"wrote {path.absolute()}", err=True)


def _failure(path: Path, problem: OSError) -> UserError:
    return UserError(f"cannot write {path}: {problem.strerror}; give another file")
