"""Addresses of a drafter service, Unix sockets and TCP ports, and messages about one at which none answers."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssd.errors import UserError

PROBE_TIMEOUT_S = 1.0
STEPS = ".steps"
"""Suffix of the path of a service's step socket."""
MAX_SOCKET_PATH_BYTES = 103 - len(STEPS)
"""Maximum length of the paths of both sockets; macOS has the lowest limit of all systems."""
OWNER_ONLY = 0o600
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""Beginning of a client's HTTP/2 connection, with an empty frame of settings."""
HTTP2_SETTINGS = b"\x04"
"""Type of the first frame of a server, in its fourth byte."""
TLS_ALERT = b"\x15\x03"
OTHER_SERVERS = {
    b"HTTP/": "an HTTP server",
    b"<": "an HTTP server",
    b"SSH-": "an SSH server",
    b"-": "a Redis server",
}
"""Servers by the beginning of their response to `HTTP2_PREFACE`."""


@dataclass(frozen=True)
class Address:
    """`unix:/path` or `host:port`, as gRPC spells them."""

    text: str

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the address in a text. Raises UserError if it is neither a Unix socket nor host and port."""
        if text.startswith("unix:") and len(text) > len("unix:"):
            return cls("unix:" + str(Path(text.removeprefix("unix:").removeprefix("//")).absolute()))
        host, colon, port = text.rpartition(":")
        is_one_host = ":" not in host or (host.startswith("[") and host.endswith("]"))
        if colon and host and is_one_host and port.isascii() and port.isdecimal() and int(port) < 1 << 16:
            return cls(text)
        raise UserError(f"{text!r} is not an address; give unix:/path/to/socket or host:port, such as 127.0.0.1:50051")

    @property
    def socket_path(self) -> Path | None:
        """Path of a Unix socket; None for a port."""
        return Path(self.text.removeprefix("unix:")) if self.text.startswith("unix:") else None

    @property
    def steps(self) -> Address | None:
        """Address of the step socket (see `frames`) in the folder of the gRPC socket; None for a port."""
        return None if self.socket_path is None else Address(self.text + STEPS)

    @property
    def is_local(self) -> bool:
        """Whether the address is reachable from this machine only: a Unix socket, loopback, or `localhost`.

        Other names count as remote, even if they currently resolve to this machine.
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
        """Return the address with the port that the system chose for port 0."""
        host, _, chosen = self.text.rpartition(":")
        return Address(f"{host}:{port}") if self.socket_path is None and int(chosen) == 0 else self

    def claim(self) -> None:
        """Check that no server listens at a Unix socket, and remove a stale socket file.

        Otherwise gRPC would silently replace the socket of a running server. Raises UserError.
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
        try:
            self.connect().close()
        except ConnectionRefusedError:
            path.unlink()
        except OSError as problem:
            raise UserError(f"cannot use the socket {path}: {problem.strerror or problem}") from None
        else:
            raise UserError(f"{path} is in use by another server; stop that one or choose another path")

    def check_bindable(self) -> None:
        """Raise UserError with the system's reason if no socket can be bound here; gRPC would only log the reason."""
        try:
            found = self._sockets()
        except OSError as problem:
            raise UserError(f"cannot listen at {self.text}: {problem.strerror or problem}; check the host") from None
        reason = ""
        for family, where in found:
            try:
                with socket.socket(family) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(where)
            except OSError as problem:
                reason = problem.strerror or str(problem)
            else:
                if self.socket_path is not None:
                    self.socket_path.unlink()
                return
        raise UserError(f"cannot listen at {self.text}: {reason}; choose another address")

    def connect(self) -> socket.socket:
        """Return a connection to what listens here. Raises OSError if nothing does."""
        problem = OSError("the host has no address")
        for family, where in self._sockets():
            connection = socket.socket(family)
            connection.settimeout(PROBE_TIMEOUT_S)
            try:
                connection.connect(where)
            except OSError as refused:
                connection.close()
                problem = refused
            else:
                return connection
        raise problem

    def kind_of_other_server(self) -> str | None:
        """Return what kind of server listens here, such as "an HTTP server"; None if it may be a drafter, or is silent.

        It gets the beginning of an HTTP/2 connection, which drafters speak.
        """
        answer = b""
        with suppress(OSError), self.connect() as probe:
            probe.sendall(HTTP2_PREFACE)
            answer = probe.recv(64)
        if not answer or answer[:2] == TLS_ALERT or answer[3:4] == HTTP2_SETTINGS:
            return None
        return next(
            (kind for start, kind in OTHER_SERVERS.items() if answer.startswith(start)), "another kind of server"
        )

    def _sockets(self) -> list[tuple[int, Any]]:
        """Return the socket families and addresses of this address. Raises OSError if its host does not resolve."""
        if self.socket_path is not None:
            return [(socket.AF_UNIX, str(self.socket_path))]
        host, _, port = self.text.rpartition(":")
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        return [(family, where) for family, _, _, _, where in found]

    @contextmanager
    def permissions(self, mode: int) -> Iterator[None]:
        """Set the mode of a Unix socket that is bound within the block; until then only its owner can use it.

        The umask of the process changes within the block, so only the owner can use files that other threads create.
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


STATE = "ssd-drafter-state"
"""Metadata of responses to health checks, such as "compiling kernels, 40 %"."""
NOT_READY = "not ready: "
"""Start of the details of calls that are refused with UNAVAILABLE while a service is not ready; its state follows."""

CLOSED = ("Socket closed", "Connection reset by peer", "Broken pipe")
"""Errors of a connection that was accepted and then closed, as a server with TLS does without a handshake, and one that
requires certificates without the caller's."""

UNRESOLVED = ("Domain name not found", "DNS server", "Name or service not known", "name resolution")
"""Parts of the errors for names of hosts that do not resolve, by c-ares and by the operating system."""


def system_error(details: str) -> str:
    """Return the operating system's error, such as "Connection refused", which ends the text of a gRPC error."""
    return details.rpartition(": ")[2].rstrip("]")


def absence(address: str, reason: str) -> str:
    """Return a message that no drafter answers at an address, with the reason and what to do."""
    if "denied" in reason:
        return f"you may not use {address} ({reason}); ask its owner, or see `ssd-drafter serve --socket-mode`"
    if any(error in reason for error in CLOSED):
        advice = "give its CA and, if it requires one, your certificate: --ca, --certificate, --key or `ClientAccess`"
        return f"no drafter answers at {address} ({reason}); if it uses TLS, {advice}"
    if any(error in reason for error in UNRESOLVED):
        return f"the host of {address} does not resolve ({reason}); check its name"
    return f"no drafter answers at {address} ({reason}); {start_one(address)}"


def start_one(address: str) -> str:
    """Return advice to start a drafter at an address."""
    return f"start one with: ssd-drafter serve --listen {address}"
