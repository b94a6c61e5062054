"""Progress of a load, in a small file from which the next load continues."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ValidationError

from drafter_service.atomic import write_atomically
from drafter_service.ingest.documents import Position
from drafter_service.ingest.files import File
from ssd.errors import UserError


class FileProgress(BaseModel):
    """Progress in one file."""

    size: int
    version: str
    offset: int = 0
    item: int = 0
    is_done: bool = False


class ResumeFile(BaseModel):
    """Contents of the progress file."""

    format: int = 1
    into: str
    """Destination of the load."""
    files: dict[str, FileProgress] = {}


class Resume:
    """Positions from which to continue with each file. Without a path nothing is stored."""

    def __init__(self, path: Path | None, into: str) -> None:
        """Read the progress file, if any, of a load into `into`. Raises UserError for the file of another load."""
        self._path = path
        self._state = ResumeFile(into=into)
        if path is None or not path.exists():
            return
        try:
            state = ResumeFile.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            raise UserError(f"--resume: {path} is not a progress file; remove it to start again") from None
        if state.into != into or state.format != self._state.format:
            raise UserError(f"--resume: {path} belongs to a load into {state.into}; remove it to start again")
        self._state = state

    @property
    def is_kept(self) -> bool:
        """Whether progress is stored."""
        return self._path is not None

    @property
    def is_new(self) -> bool:
        """Whether nothing has been learned yet."""
        return not self._state.files

    def start_of(self, file: File) -> Position | None:
        """Return the position to continue from; None if the file was read to its end. A changed file starts again."""
        done = self._state.files.get(file.name)
        if done is None or (done.size, done.version) != (file.size, file.version):
            return Position()
        return None if done.is_done else Position(done.offset, done.item)

    def record(self, file: File, position: Position, is_done: bool) -> None:
        """Record that a file was learned up to a position."""
        self._state.files[file.name] = FileProgress(
            size=file.size, version=file.version, offset=position.offset, item=position.item, is_done=is_done
        )

    def write(self) -> None:
        """Write the progress to disk, after the sink has committed. Raises UserError."""
        if self._path is None:
            return
        try:
            write_atomically(self._path, self._state.model_dump_json())
        except OSError as problem:
            raise UserError(f"--resume: {self._path} cannot be written: {problem.strerror}") from None
