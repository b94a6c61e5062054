"""Settings of access to the sidecar."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

OCTAL_MODE = re.compile(r"0?[0-7]{3}")
OWNER_MAY_CONNECT = 0o600


@dataclass(frozen=True)
class AccessConfig:
    """Certificates, callers and permissions. Files are read again when they change."""

    certificate: Path | None = None
    """PEM file with the server's certificate and those between it and its CA. With `key` it switches TLS on."""
    key: Path | None = None
    """PEM file with the certificate's private key, not encrypted."""
    client_ca: Path | None = None
    """PEM file with the CAs of the callers' certificates. Given, nobody connects without such a certificate."""
    callers: Path | None = None
    """TOML file that says who may do what. Without it everybody who can connect has every right."""
    allow_plaintext: bool = False
    """Listen on a network address without TLS. Everybody on the way can read prompts, outputs and tokens."""
    socket_mode: str = "0600"
    """Permissions of a Unix socket, octal as for chmod. Whoever may write to it may connect."""

    def __post_init__(self) -> None:
        """Raises ValueError for settings that contradict one another."""
        for given, needed in (("certificate", "key"), ("key", "certificate"), ("client_ca", "certificate")):
            if getattr(self, given) is not None and getattr(self, needed) is None:
                raise ValueError(f"{given} needs {needed}; give both or neither")
        if not OCTAL_MODE.fullmatch(self.socket_mode):
            raise ValueError(f"socket_mode is octal, such as 0600 or 0660, not {self.socket_mode!r}")
        if self.socket_permissions & OWNER_MAY_CONNECT != OWNER_MAY_CONNECT:
            raise ValueError(f"socket_mode {self.socket_mode} shuts the server's own user out; 0600 is the least")

    @property
    def has_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.certificate is not None

    @property
    def socket_permissions(self) -> int:
        """`socket_mode` as bits."""
        return int(self.socket_mode, 8)
