"""Values read from files, and read again when the files change."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from ssd.errors import UserError

LOG = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0

T = TypeVar("T")
Signature = tuple[tuple[int, int, int] | None, ...]


class Watched(Generic[T]):
    """What `read` makes of some files. Any thread may ask."""

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], T],
        *,
        check_interval_s: float = CHECK_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read them a first time. `read` raises UserError, here and never later, for files that it cannot use."""
        self._paths = paths
        self._read = read
        self._check_interval_s = check_interval_s
        self._clock = clock
        self._checking = threading.Lock()
        # The signature is taken first: what changes while it is being read is read again.
        self._signature = self._sign()
        self._value = read()
        self._next_check = clock() + check_interval_s

    def current(self) -> T:
        """The value, the same object until a file changes. Files that cannot be used leave it as it was."""
        if self._clock() < self._next_check:
            return self._value
        with self._checking:
            self._next_check = self._clock() + self._check_interval_s
            signature = self._sign()
            if signature != self._signature:
                self._signature = signature
                self._take_over()
            return self._value

    def _take_over(self) -> None:
        try:
            self._value = self._read()
        except (UserError, OSError) as problem:
            LOG.error("%s; what was read before stays in force", problem)
        else:
            LOG.info("read again: %s", ", ".join(map(str, self._paths)))

    def _sign(self) -> Signature:
        return tuple(map(_sign, self._paths))


def _sign(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_file(path: Path, what: str) -> bytes:
    """The contents of a file. Raises UserError, in which `what` names the setting."""
    try:
        return path.read_bytes()
    except OSError as problem:
        raise UserError(f"{what}: cannot read {path}: {problem.strerror or problem}") from None
