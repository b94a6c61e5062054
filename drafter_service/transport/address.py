"""Where a drafter listens: a Unix socket or a TCP port, and whether it is free."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ssd.errors import UserError

PROBE_TIMEOUT_S = 1.0
STEPS = ".steps"
"""Behind the path of a socket: the one for steps."""
MAX_SOCKET_PATH_BYTES = 103 - len(STEPS)
"""What every Unix allows, macOS the least, for both sockets."""
OWNER_ONLY = 0o600


@dataclass(frozen=True)
class Address:
    """`unix:/path` or `host:port`, as gRPC spells them."""

    text: str

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises UserError for anything that is neither a Unix socket nor a host and port."""
        if text.startswith("unix:") and len(text) > len("unix:"):
            return cls("unix:" + str(Path(text.removeprefix("unix:").removeprefix("//")).absolute()))
        host, colon, port = text.rpartition(":")
        is_one_host = ":" not in host or (host.startswith("[") and host.endswith("]"))
        if colon and host and is_one_host and port.isascii() and port.isdecimal() and int(port) < 1 << 16:
            return cls(text)
        raise UserError(
            f"{text!r} is no address; give unix:/path/to/socket or host:port, such as 127.0.0.1:50051 or [::1]:50051"
        )

    @property
    def socket_path(self) -> Path | None:
        """The file of a Unix socket."""
        return Path(self.text.removeprefix("unix:")) if self.text.startswith("unix:") else None

    @property
    def steps(self) -> Address | None:
        """The socket for steps (see `frames`), beside that of gRPC; None for a port."""
        return None if self.socket_path is None else Address(self.text + STEPS)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it: a Unix socket, loopback, or the name `localhost`.

        Other names count as open, whatever they resolve to now.
        """
        if self.socket_path is not None:
            return True
        host = self.text.rpartition(":")[0].strip("[]")
        if host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    def at_port(self, port: int) -> Address:
        """Itself, with the port that the system chose where it left that open (port 0)."""
        host, _, chosen = self.text.rpartition(":")
        return Address(f"{host}:{port}") if self.socket_path is None and int(chosen) == 0 else self

    def claim(self) -> None:
        """Make sure that nobody else listens at a Unix socket, and clear away what a dead server left.

        gRPC itself would silently take the path over from a living server. Raises UserError.
        """
        path = self.socket_path
        if path is None:
            return
        if len(bytes(path).removesuffix(STEPS.encode())) > MAX_SOCKET_PATH_BYTES:
            raise UserError(
                f"{path} is too long for a Unix socket; choose a path of at most {MAX_SOCKET_PATH_BYTES} bytes"
            )
        if not path.parent.is_dir():
            raise UserError(f"there is no directory {path.parent} for the socket; create it or choose another path")
        if not path.exists():
            return
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise UserError(f"{path} exists and is not a socket; choose another path")
        if _is_answered(path):
            raise UserError(f"{path} is in use by another server; stop that one or choose another path")
        path.unlink()

    @contextmanager
    def permissions(self, mode: int) -> Iterator[None]:
        """A Unix socket that is bound within has this mode afterwards, and was the owner's alone until then.

        The mask that this takes is the whole process's, so files made meanwhile by other threads are the owner's alone.
        """
        path = self.socket_path
        if path is None:
            yield
            return
        previous = os.umask(0o777 & ~OWNER_ONLY)
        try:
            yield
        finally:
            os.umask(previous)
        path.chmod(mode)


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError as problem:
            raise UserError(f"cannot use the socket {path}: {problem.strerror or problem}") from None
        return True
