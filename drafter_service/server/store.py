"""Namespaces on disk: a folder each, with the corpus and its description. Every file is replaced atomically.

A file whose contents are proven damaged is set aside: renamed, and only removed by an explicit command. Any other
error leaves all files as they are. Methods may block for as long as the file system does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import structlog
from pydantic import BaseModel, FiniteFloat, ValidationError

from drafter_service.observability.facts import ModelIdentity, Sample
from drafter_service.observability.report.schema import ClientTotals
from drafter_service.server.naming import KnownNamespace
from ssd.corpus import snapshot
from ssd.corpus.sections import DamagedError
from ssd.corpus.snapshot import Loaded
from ssd.errors import UserError

logger = structlog.get_logger(__name__)

CORPUS = "corpus.ssd"
DESCRIPTION = "namespace.json"
SET_ASIDE = re.compile(r"(corpus|namespace)\.refused(\.\d+)?")
"""Pattern of the names of files that were set aside."""
LOCK = ".lock"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@-]{0,127}")
"""Pattern of valid names of namespaces; each is also the name of a folder."""


T = TypeVar("T")


class Description(BaseModel):
    """Data of a namespace that is stored in addition to its corpus."""

    name: str
    model: ModelIdentity
    tokens: int | None = None
    """Number of tokens of the corpus; None in the descriptions of versions up to 0.2.0."""
    clients: ClientTotals = ClientTotals()
    duplicates: int = 0
    learned_tokens: int = 0
    """Number of tokens that were ever learned; 0 in the descriptions of versions up to 0.2.0."""
    log_position: str | None = None
    """Position in the shared log that had been read before the corpus was saved."""
    history: list[tuple[float, ...]] = []
    forgotten: dict[int, FiniteFloat] = {}
    """Hashes of the names that were forgotten last, oldest first, with the times of that in seconds since 1970."""
    forgotten_before: FiniteFloat | None = None
    """Time before which everything was forgotten, in seconds since 1970; None if that was never done."""

    def samples(self) -> list[Sample]:
        """Return the history; empty if another version wrote it."""
        if any(len(row) != len(Sample._fields) for row in self.history):
            return []
        return [Sample(row[0], *map(int, row[1:])) for row in self.history]


class Stored(NamedTuple):
    """The stored parts of a namespace; None for one that was never saved, or is set aside."""

    description: Description | None
    loaded: Loaded | None
    learned: dict[int, float] | None = None
    """`Corpus.request_times` of the loaded corpus."""


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

    def __init__(self, folder: Path, *, may_trim: bool = False) -> None:
        """Make the folder if necessary; may_trim: as in `snapshot.load`.

        Raises UserError if the folder cannot be made or written to.
        """
        self.folder = folder
        self._may_trim = may_trim
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, probe = tempfile.mkstemp(dir=folder)
            os.close(descriptor)
            os.unlink(probe)
            self._lock: os.stat_result | None = None
            """The lock file, while this process holds it."""
            self.set_aside: dict[str, list[str]] = {}
            """Names of the files that were set aside, by namespace, as of the last listing."""
            self.known: dict[str, KnownNamespace] = {}
            """What is known of each namespace that was found or written here, and not deleted."""
            self.names()
        except OSError as problem:
            raise UserError(f"snapshots.folder: cannot write to {folder}: {problem.strerror}") from None

    @contextlib.contextmanager
    def exclusive_use(self) -> Iterator[None]:
        """Lock the folder, as the function `exclusive_use`."""
        in_use = "snapshots.folder: another service, or `ssd-drafter warm`, uses {}; give each service its own folder"
        with exclusive_use(self.folder, in_use):
            self._lock = (self.folder / LOCK).stat()
            yield
            self._lock = None

    def names(self) -> list[str]:
        """Return the names of the stored namespaces, sorted. Raises OSError."""
        self._check_folder()
        found, set_aside = [], {}
        for name in filter(NAME.fullmatch, os.listdir(self.folder)):
            try:
                files = os.listdir(self.folder / name)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except PermissionError:
                files = [CORPUS]
            set_aside[name] = sorted(filter(SET_ASIDE.fullmatch, files))
            if set_aside[name] or {CORPUS, DESCRIPTION}.intersection(files):
                found.append(name)
        self.set_aside = {name: files for name, files in set_aside.items() if files}
        for name in found:
            if name not in self.known:
                self.known[name] = self._read_known(name)
        return sorted(found)

    def has(self, name: str) -> bool:
        """Return whether a namespace is stored. Raises OSError."""
        return name in self.set_aside or any(self._exists(self.folder / name / file) for file in (CORPUS, DESCRIPTION))

    def corpus_path(self, name: str) -> Path:
        """Return the path of the snapshot of a namespace's corpus, which need not exist."""
        return self.folder / name / CORPUS

    def read(self, name: str, capacity: int, depth: int) -> Stored:
        """Return the stored parts of a namespace; capacity and depth as in `snapshot.load`.

        A part that is proven damaged is set aside and logged. Raises OSError, MemoryError and SnapshotError for what
        cannot be read now, with all files as they were.
        """
        description = self._sound(name, DESCRIPTION, _read_description)
        loaded = self._sound(name, CORPUS, lambda path: snapshot.load(path, capacity, depth, may_trim=self._may_trim))
        return Stored(description, loaded, loaded.corpus.request_times() if loaded else None)

    def _read_known(self, name: str) -> KnownNamespace:
        try:
            description = _read_description(self.folder / name / DESCRIPTION)
        except (OSError, DamagedError):
            return KnownNamespace()
        return KnownNamespace(description.model, description.tokens, description.log_position)

    def make_folder(self, name: str) -> None:
        """Make a namespace's folder. Raises OSError."""
        self._check_folder()
        (self.folder / name).mkdir(mode=0o700, exist_ok=True)

    def write_description(self, description: Description) -> None:
        """Replace the description atomically. Raises OSError, after which the old file remains."""
        self._check_folder()  # It is written last, so that a corpus that was saved elsewhere does not count as saved.
        _write_atomically(self.folder / description.name / DESCRIPTION, description.model_dump_json())
        self.known[description.name] = KnownNamespace(description.model, description.tokens, description.log_position)

    def remove_set_aside(self, name: str) -> list[str]:
        """Remove the files of a namespace that were set aside; return their names. Raises OSError."""
        self.names()
        files = self.set_aside.get(name, [])
        for file in files:
            (self.folder / name / file).unlink(missing_ok=True)
        self.set_aside.pop(name, None)
        return files

    def delete(self, name: str) -> None:
        """Remove a namespace, with what was set aside of it. Raises OSError if files cannot be removed."""
        self._check_folder()
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.folder / name)
        self.set_aside.pop(name, None)
        self.known.pop(name, None)

    def _sound(self, name: str, file: str, read: Callable[[Path], T]) -> T | None:
        """Return the contents of a file; None if it does not exist, or is proven damaged and was set aside."""
        path = self.folder / name / file
        if not self._exists(path):
            return None
        try:
            return read(path)
        except DamagedError as problem:
            reason = str(problem)
        kept = self._set_aside(path)
        self.set_aside[name] = [*self.set_aside.get(name, []), kept.name]
        logger.error("snapshot refused", namespace=name, reason=reason, set_aside=str(kept))
        return None

    def _set_aside(self, path: Path) -> Path:
        """Rename a file, never to the name of another one; return its new path. Raises OSError."""
        first = path.with_suffix(".refused")
        others = (first.with_name(f"{first.name}.{number}") for number in itertools.count(2))
        unused = next(each for each in itertools.chain([first], others) if not self._exists(each))
        return path.rename(unused)

    def _exists(self, path: Path) -> bool:
        """Return whether a file exists. Raises OSError if that is not known, and for a folder, pipe or device."""
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise OSError(errno.EINVAL, f"{path} is not a file")
        except (FileNotFoundError, NotADirectoryError):
            self._check_folder()
            return False
        return True

    def _check_folder(self) -> None:
        """Raise OSError if the lock file is another one: this may be the mount point of a lost disk."""
        if self._lock is None:
            return
        path = self.folder / LOCK
        try:
            is_same = os.path.samestat(self._lock, path.stat())
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise OSError(errno.ESTALE, f"{path} is gone or another file; restore the folder, or restart the service")


def _read_description(path: Path) -> Description:
    """Return a description. Raises OSError, and DamagedError for a file that is not one."""
    try:
        return Description.model_validate_json(path.read_bytes())
    except ValidationError:
        raise DamagedError(f"{path}: is not the description of a namespace") from None


def _write_atomically(path: Path, text: str) -> None:
    """Replace a file, with permissions for its owner only. After an OSError the previous contents remain."""
    # Always the same name, so that the next write replaces what a killed process has left.
    part = path.with_name(f".{path.name}.part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
