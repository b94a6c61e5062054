"""Read and check files of certificates, tokens and callers, and reload them when they change."""

from __future__ import annotations

import logging
import ssl
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
    """A value that `read` makes from files. Any thread may use it."""

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], T],
        *,
        check_interval_s: float = CHECK_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the files. Raises the UserError of `read` for unusable files; each later error is logged once.

        check_interval_s: time after which `current` checks the files again; infinite: only `check` does.
        """
        self._paths = paths
        self._read = read
        self._check_interval_s = check_interval_s
        self._clock = clock
        self._checking = threading.Lock()
        # The signature is computed first, so that a change while the files are read is detected.
        self._signature = self._sign()
        """Signature of the files when `_value` was read."""
        self._value = read()
        self._problem = ""
        """Why changed files cannot be used."""
        self._next_check = clock() + check_interval_s

    def current(self) -> T:
        """Return the value, the same object until a file changes.

        Unusable files do not change it, and are read again at the next check: the error may pass.
        """
        if self._clock() >= self._next_check:
            self.check()
        return self._value

    def check(self) -> None:
        """Read the files again if they have changed. Blocks for as long as the file system does."""
        with self._checking:
            self._next_check = self._clock() + self._check_interval_s
            signature = self._sign()
            if signature != self._signature:
                self._reload(signature)

    def _reload(self, signature: Signature) -> None:
        before = self._problem
        try:
            self._value = self._read()
        except (UserError, OSError) as problem:
            self._problem = str(problem)
            if self._problem != before:
                LOG.error("%s; the previous contents remain in force", problem)
        else:
            self._signature, self._problem = signature, ""
            LOG.info("reloaded: %s", ", ".join(map(str, self._paths)))

    def _sign(self) -> Signature:
        return tuple(map(_sign, self._paths))


def _sign(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_file(path: Path, what: str) -> bytes:
    """Return the contents of a file. Raises UserError; `what` names the setting."""
    try:
        return path.read_bytes()
    except OSError as problem:
        raise UserError(f"{what}: cannot read {path}: {problem.strerror or problem}") from None


def check_pair(certificate: Path, key: Path) -> None:
    """Raise UserError unless these are a certificate and its key; gRPC would only fail every handshake."""
    read_file(certificate, "certificate")
    read_file(key, "key")
    try:
        # With a password, an encrypted key is an error instead of a prompt.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError, ValueError) as problem:
        reason = getattr(problem, "reason", None) or problem
        raise UserError(f"certificate, key: {certificate} and {key} are not a pair in PEM form: {reason}") from None


def check_ca(path: Path, what: str) -> None:
    """Raise UserError unless the file has certificates of CAs; `what` names the setting."""
    read_file(path, what)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except (ssl.SSLError, OSError, ValueError) as problem:
        raise UserError(f"{what}: {path} has no certificates in PEM form ({problem})") from None
