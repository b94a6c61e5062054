"""How far a load came, in a small file, so that the next one goes on from there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pydantic import BaseModel, ValidationError

from drafter_service.ingest.chunk import Position
from drafter_service.ingest.files import File
from ssd.errors import UserError


class Done(BaseModel):
    """What was learned of a file."""

    size: int
    version: str
    offset: int = 0
    item: int = 0
    is_done: bool = False


class State(BaseModel):
    """The content of the file."""

    format: int = 1
    into: str
    """Where to it was learned."""
    files: dict[str, Done] = {}


class Resume:
    """Where to begin with each file, and what to begin with the next time. Without a path it forgets."""

    def __init__(self, path: Path | None, into: str) -> None:
        """`into`: says where to the load goes. Raises UserError for a file that is none of this load's."""
        self._path = path
        self._state = State(into=into)
        if path is None or not path.exists():
            return
        try:
            state = State.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            raise UserError(f"--resume: {path} does not say how far a load came; remove it to begin anew") from None
        if state.into != into or state.format != self._state.format:
            raise UserError(f"--resume: {path} belongs to a load into {state.into}; remove it to begin anew")
        self._state = state

    @property
    def is_kept(self) -> bool:
        """Whether there is a file."""
        return self._path is not None

    @property
    def is_new(self) -> bool:
        """Whether nothing was learned yet."""
        return not self._state.files

    def start_of(self, file: File) -> Position | None:
        """Where to go on reading a file; None if it was read to its end. One that changed begins anew."""
        done = self._state.files.get(file.name)
        if done is None or (done.size, done.version) != (file.size, file.version):
            return Position()
        return None if done.is_done else Position(done.offset, done.item)

    def note(self, file: File, position: Position, is_done: bool) -> None:
        """A file was learned up to a position."""
        self._state.files[file.name] = Done(
            size=file.size, version=file.version, offset=position.offset, item=position.item, is_done=is_done
        )

    def write(self) -> None:
        """Put what was noted on disk. Only once all of it is safe where it was learned. Raises UserError."""
        if self._path is None:
            return
        try:
            descriptor, part = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=self._path.parent)
            try:
                with os.fdopen(descriptor, "w") as file:
                    file.write(self._state.model_dump_json())
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, self._path)
            except BaseException:
                Path(part).unlink(missing_ok=True)
                raise
        except OSError as problem:
            raise UserError(f"--resume: {self._path} cannot be written: {problem.strerror}") from None
