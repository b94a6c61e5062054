"""Every setting of the sidecar, as one tree. Numbers that someone chose say why."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from ssd.config import DrafterConfig
from ssd.corpus.ring import check_capacity

Positive = Annotated[int, Ge(1)]
Seconds = Annotated[float, Gt(0)]

OCTAL_MODE = re.compile(r"0?[0-7]{3}")
OWNER_MAY_CONNECT = 0o600


@dataclass(frozen=True)
class Limits:
    """What one service takes on, so that nobody can fill its memory."""

    streams: Positive = 1024
    """Streams at a time; more are refused."""
    sequences: Positive = 4096
    """Running sequences of a stream; the ones that were silent for longest are let go and asked for again."""
    stream_tokens: Positive = 32_000_000
    """Tokens of a stream's running sequences, prompts included; as above."""
    waiting_tokens: Positive = 2_000_000
    """Learned, but not draftable yet: whoever wants more learned waits. About two seconds of merging."""


@dataclass(frozen=True)
class AccessConfig:
    """Certificates, callers and permissions. Files are reloaded when they change."""

    certificate: Path | None = None
    """PEM file with the server's certificate and intermediate ones. With `key` it switches TLS on."""
    key: Path | None = None
    """PEM file with the certificate's private key, not encrypted."""
    client_ca: Path | None = None
    """PEM file with the CAs of the callers' certificates. If set, every caller needs such a certificate."""
    callers: Path | None = None
    """TOML file with the callers and their rights. Without it everybody who can connect has every right."""
    allow_plaintext: bool = False
    """Listen on a network address without TLS. Others on the network can read prompts, outputs and tokens."""
    socket_mode: str = "0600"
    """Permissions of a Unix socket, octal as for chmod. Write permission is permission to connect."""

    def __post_init__(self) -> None:
        """Raises ValueError for settings that contradict one another."""
        for given, needed in (("certificate", "key"), ("key", "certificate"), ("client_ca", "certificate")):
            if getattr(self, given) is not None and getattr(self, needed) is None:
                raise ValueError(f"{given} needs {needed}; give both or neither")
        if not OCTAL_MODE.fullmatch(self.socket_mode):
            raise ValueError(f"socket_mode must be octal, such as 0600 or 0660, not {self.socket_mode!r}")
        if self.socket_permissions & OWNER_MAY_CONNECT != OWNER_MAY_CONNECT:
            raise ValueError(f"socket_mode {self.socket_mode} excludes the server's own user; use at least 0600")

    @property
    def has_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.certificate is not None

    @property
    def socket_permissions(self) -> int:
        """`socket_mode` as an integer."""
        return int(self.socket_mode, 8)


@dataclass(frozen=True)
class Snapshots:
    """Where namespaces survive the process."""

    folder: Path | None = None
    """Each namespace has a folder of its own in it. Without it everything is forgotten when the service stops."""
    interval_s: Seconds = 300.0
    """How often a namespace that learned something is saved, beside when the service stops."""


@dataclass(frozen=True)
class Namespaces:
    """Which isolated corpora there are."""

    budget: Positive = 4_000_000_000
    """Bytes over all loaded namespaces. A namespace counts with what its capacity can cost at most."""
    create: bool = True
    """Whether a name that nobody used before makes a namespace; otherwise only those in `capacities`."""
    idle_s: Seconds = 3600.0
    """A namespace without streams that was not used for so long is saved and leaves memory, if it can be saved."""
    capacities: Mapping[str, Positive] = field(default_factory=dict)
    """Tokens remembered, for namespaces that differ from `drafting.capacity`; they are made at the start."""


@dataclass(frozen=True)
class Log:
    """The log of finished requests that several sidecars share."""

    url: str | None = None
    """redis://HOST:PORT/DB or rediss://; without it the service runs alone."""
    prefix: str = "default"
    """Sidecars with the same one share their logs."""
    max_tokens: Positive = 32_000_000
    """Tokens kept in the log of a namespace; a new replica cannot catch up with more than these."""
    queue_tokens: Positive = 4_000_000
    """Tokens that wait for the log while it is away; the oldest are dropped beyond that."""


@dataclass(frozen=True)
class Reports:
    """What the service tells about itself."""

    metrics: str | None = None
    """HOST:PORT of the Prometheus endpoint."""
    sample_s: Seconds = 10.0
    """How often the counters are sampled for figures over time."""
    passages: bool = False
    """Whether administrators may ask for the texts that drafts came from: they are users' text."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"
    tracing: bool = False
    """Traces through OpenTelemetry, which reads its own environment variables."""


@dataclass(frozen=True)
class ServiceConfig:
    """The whole service."""

    listen: str = "unix:/tmp/ssd-drafter.sock"
    """unix:/path/to/socket or host:port; port 0 takes a free one."""
    drafting: DrafterConfig = field(default_factory=DrafterConfig)
    namespaces: Namespaces = field(default_factory=Namespaces)
    limits: Limits = field(default_factory=Limits)
    access: AccessConfig = field(default_factory=AccessConfig)
    snapshots: Snapshots = field(default_factory=Snapshots)
    log: Log = field(default_factory=Log)
    reports: Reports = field(default_factory=Reports)

    def __post_init__(self) -> None:
        """Raises ValueError for settings that contradict one another."""
        if self.drafting.options:
            raise ValueError("drafting.options is for third-party drafters; the service has none")
        for key, capacity in (("drafting.capacity", self.drafting.capacity), *_keyed(self.namespaces.capacities)):
            try:
                check_capacity(capacity)
            except ValueError as problem:
                raise ValueError(f"{key}: {problem}") from None


def _keyed(capacities: Mapping[str, int]) -> list[tuple[str, int]]:
    return [(f"namespaces.capacities.{name}", capacity) for name, capacity in capacities.items()]
