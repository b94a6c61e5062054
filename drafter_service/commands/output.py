"""Files that commands write."""

from __future__ import annotations

from pathlib import Path

import click

from ssd.errors import UserError


def check_writable(path: Path) -> None:
    """Raise UserError if a file cannot be written. Its contents do not change.

    Commands that work for minutes call this before they begin.
    """
    new = None if path.exists() else path.resolve()
    try:
        path.open("a").close()
    except OSError as problem:
        raise _failure(path, problem) from None
    if new is not None:
        new.unlink()


def write(path: Path, text: str) -> None:
    """Write a file and print its path to standard error. Raises UserError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise _failure(path, problem) from None
    click.echo(f"wrote {path.absolute()}", err=True)


def _failure(path: Path, problem: OSError) -> UserError:
    return UserError(f"cannot write {path}: {problem.strerror}; give another file")
