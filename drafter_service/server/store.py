"""Namespaces on disk: a folder each, with the corpus and its description. Every file is replaced atomically."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ValidationError

from drafter_service.observability.facts import ModelIdentity, Sample
from drafter_service.observability.report.schema import ClientTotals
from ssd.errors import UserError

CORPUS = "corpus.ssd"
DESCRIPTION = "namespace.json"
REFUSED = "corpus.refused"
LOCK = ".lock"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@-]{0,127}")
"""Pattern of valid names of namespaces; each is also the name of a folder."""


class Description(BaseModel):
    """Data of a namespace that is stored in addition to its corpus."""

    name: str
    model: ModelIdentity
    clients: ClientTotals = ClientTotals()
    duplicates: int = 0
    log_position: str | None = None
    """Position in the shared log that had been read before the corpus was saved."""
    history: list[tuple[float, ...]] = []

    def samples(self) -> list[Sample]:
        """Return the history; empty if another version wrote it."""
        if any(len(row) != len(Sample._fields) for row in self.history):
            return []
        return [Sample(row[0], *map(int, row[1:])) for row in self.history]


def folder_of(path: Path) -> Path | None:
    """Return the snapshot folder of a service in which a file is the corpus of a namespace; None if it is in none."""
    corpus = path.resolve()
    folder = corpus.parent.parent
    return folder if corpus.name == CORPUS and (folder / LOCK).exists() else None


@contextlib.contextmanager
def exclusive_use(folder: Path | None, in_use: str = "{} is in use") -> Iterator[None]:
    """Lock a folder of snapshots, so that two processes do not overwrite each other's files.

    The lock ends with the process. Raises UserError if the folder cannot be locked; in_use: its text, for the folder,
    if another process has locked it.
    """
    if folder is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context((folder / LOCK).open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(in_use.format(folder)) from None
        except OSError as problem:
            raise UserError(f"{folder} cannot be locked: {problem.strerror}") from None
        yield


class Store:
    """A folder of namespaces, for one process at a time."""

    def __init__(self, folder: Path) -> None:
        """Make the folder if necessary. Raises UserError if it cannot be made or written to."""
        self.folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, probe = tempfile.mkstemp(dir=folder)
            os.close(descriptor)
            os.unlink(probe)
        except OSError as problem:
            raise UserError(f"snapshots.folder: cannot write to {folder}: {problem.strerror}") from None

    def names(self) -> list[str]:
        """Return the names of the stored namespaces."""
        return sorted({path.parent.name for file in (CORPUS, DESCRIPTION) for path in self.folder.glob(f"*/{file}")})

    def has(self, name: str) -> bool:
        """Return whether a namespace is stored."""
        return any((self.folder / name / file).exists() for file in (CORPUS, DESCRIPTION))

    def corpus_path(self, name: str) -> Path:
        """Return the path of the snapshot of a namespace's corpus, which need not exist."""
        return self.folder / name / CORPUS

    def describe(self, name: str) -> Description | None:
        """Return the stored description of a namespace; None without a readable one."""
        try:
            return Description.model_validate_json((self.folder / name / DESCRIPTION).read_bytes())
        except (OSError, ValidationError):
            return None

    def make_folder(self, name: str) -> None:
        """Make a namespace's folder. Raises OSError."""
        (self.folder / name).mkdir(mode=0o700, exist_ok=True)

    def write_description(self, description: Description) -> None:
        """Replace the description atomically. Raises OSError, after which the old file remains."""
        _write_atomically(self.folder / description.name / DESCRIPTION, description.model_dump_json())

    def move_refused(self, name: str) -> Path:
        """Rename an unusable corpus, so that it can be examined; return its new path."""
        return self.corpus_path(name).replace(self.folder / name / REFUSED)

    def remove_refused(self, name: str) -> None:
        """Remove the renamed corpus, if there is one. Raises OSError."""
        (self.folder / name / REFUSED).unlink(missing_ok=True)

    def delete(self, name: str) -> None:
        """Remove a namespace. Raises OSError if files cannot be removed."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.folder / name)


def _write_atomically(path: Path, text: str) -> None:
    """Replace a file, with permissions for its owner only. After an OSError the previous contents remain."""
    descriptor, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
