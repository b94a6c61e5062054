"""Namespaces on disk: a folder each, with the corpus and what belongs to it. Every file is put in place whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from pydantic import BaseModel, ValidationError

from drafter_service.observability.facts import ClientTotals, ModelIdentity, Sample
from ssd.errors import UserError

CORPUS = "corpus.ssd"
DESCRIPTION = "namespace.json"
ASIDE = "corpus.refused"
LOCK = ".lock"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@-]{0,127}")
"""What a namespace may be called: it is a folder's name, too."""


class Description(BaseModel):
    """What is kept of a namespace beside its corpus."""

    name: str
    model: ModelIdentity
    clients: ClientTotals = ClientTotals()
    duplicates: int = 0
    log_position: str | None = None
    """How far the shared log had been read before the corpus was saved."""
    saved_at: float = 0.0
    """Seconds since 1970."""
    history: list[tuple[float, ...]] = []

    def samples(self) -> list[Sample]:
        """The history; empty if it was kept by another version."""
        if any(len(row) != len(Sample._fields) for row in self.history):
            return []
        return [Sample(row[0], *map(int, row[1:])) for row in self.history]


@contextlib.contextmanager
def alone_in(folder: Path | None) -> Iterator[None]:
    """No other service uses a folder of snapshots within the block: two would overwrite each other's.

    Raises UserError if one does.
    """
    if folder is None:
        yield
        return
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"snapshots.folder: another service uses {folder}; give each a folder of its own") from None
        yield


class Store:
    """A folder of namespaces, for one process at a time."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError if the folder cannot be made or written to."""
        self.folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, probe = tempfile.mkstemp(dir=folder)
            os.close(descriptor)
            os.unlink(probe)
        except OSError as problem:
            raise UserError(f"snapshots.folder: cannot write to {folder}: {problem.strerror}") from None

    def names(self) -> list[str]:
        """The namespaces that lie here."""
        return sorted({path.parent.name for file in (CORPUS, DESCRIPTION) for path in self.folder.glob(f"*/{file}")})

    def has(self, name: str) -> bool:
        """Whether a namespace lies here."""
        return any((self.folder / name / file).exists() for file in (CORPUS, DESCRIPTION))

    def corpus_path(self, name: str) -> Path:
        """Where the snapshot of a namespace's corpus lies, or will."""
        return self.folder / name / CORPUS

    def describe(self, name: str) -> Description | None:
        """What was kept of a namespace; None if there is nothing, or nothing that can be read."""
        try:
            return Description.model_validate_json((self.folder / name / DESCRIPTION).read_bytes())
        except (OSError, ValidationError):
            return None

    def make_room_for(self, name: str) -> None:
        """Make a namespace's folder. Raises OSError."""
        (self.folder / name).mkdir(mode=0o700, exist_ok=True)

    def write_description(self, description: Description) -> None:
        """Raises OSError if the disk will not take it; what was there before stays then."""
        folder = self.folder / description.name
        descriptor, part = tempfile.mkstemp(prefix=f".{DESCRIPTION}.", dir=folder)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(description.model_dump_json())
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, folder / DESCRIPTION)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise

    def set_aside(self, name: str) -> Path:
        """Move a corpus that cannot be used out of the way, for someone to look at; returns where it lies now."""
        return self.corpus_path(name).replace(self.folder / name / ASIDE)

    def remove_aside(self, name: str) -> None:
        """Remove what was set aside, if anything was. Raises OSError if it stays."""
        (self.folder / name / ASIDE).unlink(missing_ok=True)

    def delete(self, name: str) -> None:
        """Remove a namespace. Raises OSError if something of it stays."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.folder / name)


def describe(
    name: str,
    model: ModelIdentity,
    clients: ClientTotals,
    duplicates: int,
    position: str | None,
    now: float,
    history: list[Sample],
) -> Description:
    """A copy of all that is kept beside a corpus, to be written by another thread."""
    return Description(
        name=name,
        model=model,
        clients=ClientTotals(**asdict(clients)),
        duplicates=duplicates,
        log_position=position,
        saved_at=now,
        history=[tuple(sample) for sample in history],
    )
