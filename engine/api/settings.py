"""How a server is set up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ssd.errors import UserError


@dataclass(frozen=True)
class ServerConfig:
    """Where to listen, who may ask, and how much may wait."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Path | None = None
    """A file with a key a line; None: everybody who can connect may ask."""
    max_waiting: int = 256
    """Requests beyond those that run; more are refused with 429."""
    max_body_bytes: int = 4 << 20
    drain_s: float = 30.0
    """How long requests may go on after a signal to stop."""
    cached_responses: int = 0
    """Tokens of outputs kept for exact repeats of deterministic requests; 0: none."""


def read_keys(path: Path) -> frozenset[str]:
    """The keys in a file. Raises UserError for one that cannot be read, or holds none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"--api-keys: cannot read {path}: {getattr(problem, 'strerror', None) or problem}") from None
    keys = frozenset(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise UserError(f"--api-keys: {path} holds no key; write one a line")
    return keys
