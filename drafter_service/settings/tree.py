"""All settings of the service, as one tree of frozen dataclasses, and the sources that they are loaded from."""

from __future__ import annotations

import itertools
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt

from drafter_service.settings import DEFAULT_ADDRESS
from drafter_service.settings.flags import File, Flag, Folder
from drafter_service.settings.schema import Schema, read_toml
from ssd.config import DrafterConfig
from ssd.errors import UserError

if TYPE_CHECKING:
    from ssd.budget.cost_profile import CostProfile

Positive = Annotated[int, Ge(1)]
Seconds = Annotated[float, Gt(0)]

OCTAL_MODE = re.compile(r"0?[0-7]{3}")
OWNER_MAY_CONNECT = 0o600


@dataclass(frozen=True)
class Limits:
    """Limits that keep clients from exhausting the memory of the service."""

    streams: Positive = 1024
    """Maximum number of simultaneous streams; more are refused."""
    sequences: Positive = 4096
    """Maximum number of running sequences of a stream. Beyond it the least recently used ones are dropped, and their
    client has to send them again."""
    stream_tokens: Positive = 32_000_000
    """Maximum number of tokens of a stream's running sequences, including prompts; treated like `sequences`."""
    waiting_tokens: Positive = 2_000_000
    """Maximum number of learned tokens that are not draftable yet, two seconds of merging; learning waits at it."""


@dataclass(frozen=True)
class AccessConfig:
    """Certificates, callers and permissions. Files are reloaded when they change."""

    certificate: File | None = None
    """PEM file with the server's certificate and intermediate ones. Together with `key` it enables TLS."""
    key: File | None = None
    """PEM file with the certificate's private key, not encrypted."""
    client_ca: File | None = None
    """PEM file with the CAs of the callers' certificates. If set, every caller needs such a certificate."""
    callers: File | None = None
    """TOML file with the callers and their rights. Without it everybody who can connect has every right."""
    allow_plaintext: bool = False
    """Listen on a network address without TLS. Others on the network can read prompts, outputs and tokens."""
    socket_mode: Annotated[str, Flag(metavar="OCTAL")] = "0600"
    """Permissions of a Unix socket, octal as for chmod. Write permission is permission to connect."""

    def __post_init__(self) -> None:
        """Raise ValueError for contradictory settings."""
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
class SnapshotsConfig:
    """Persistence of namespaces."""

    folder: Folder | None = None
    """Folder with a subfolder for each namespace. Without it everything is lost when the service stops."""
    interval_s: Seconds = 300.0
    """Seconds between two snapshots of a namespace that has learned something. Stopping the service saves, too."""
    trim: bool = False
    """Whether a namespace whose snapshot has more tokens than its capacity is loaded without the oldest, which its next
    snapshot removes. Otherwise it is refused."""


@dataclass(frozen=True)
class NamespacesConfig:
    """Isolated corpora."""

    memory_limit: Positive = 4_000_000_000
    """Maximum bytes of all loaded namespaces together. Each counts with the maximum that its capacity can need."""
    create: bool = True
    """Whether clients may create namespaces; otherwise only those in `capacities` and libraries exist."""
    capacities: Mapping[str, Positive] = field(default_factory=dict)
    """Capacities in tokens of namespaces that differ from `drafting.capacity`. They are loaded at the start."""
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For each namespace its libraries: others of the same tokenizer, whose finished requests are drafted in it, too,
    even for callers without rights in them. They are loaded at the start."""

    def __post_init__(self) -> None:
        """Raise ValueError for a namespace that reads itself, directly or through its libraries."""
        for name in self.reads:
            if name in self._read_by(name):
                raise ValueError(f"reads: namespace {name!r} would read itself")

    @property
    def configured(self) -> list[str]:
        """Names of the namespaces that always exist."""
        return sorted({*self.capacities, *itertools.chain.from_iterable(self.reads.values())})

    def _read_by(self, name: str) -> set[str]:
        """Return all libraries of a namespace, theirs included."""
        found, waiting = set[str](), [name]
        while waiting:
            new = {*self.reads.get(waiting.pop(), ())} - found
            found |= new
            waiting += new
        return found


@dataclass(frozen=True)
class LogConfig:
    """The log of finished requests that sidecars share."""

    url: Annotated[str | None, Flag(metavar="URL")] = None
    """Address of the log, redis://HOST:PORT/DB or rediss://. Without it no other sidecar shares its text."""
    prefix: str = "default"
    """Services with the same prefix share their logs."""
    max_tokens: Positive = 32_000_000
    """Number of tokens kept in the log of a namespace. A sidecar that is further behind misses text."""


@dataclass(frozen=True)
class ReportsConfig:
    """Metrics, reports and logs."""

    metrics: Annotated[str | None, Flag(metavar="HOST:PORT")] = None
    """Address of the metrics for Prometheus."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important events that are logged."""
    log_format: Literal["console", "json"] = "console"
    """Format of logs: `console` for people, or `json` for log collectors, an object per line."""


@dataclass(frozen=True)
class StepsConfig:
    """How long the engines' steps take until they have reported durations: a guess, unless one of these is set."""

    cost_profile: File | None = None
    """File that `ssd-engine profile` has written for the engines' hardware and model."""
    gpu: str | None = None
    """GPU of the engines, such as h100; without `cost_profile`, durations are estimated from its data sheet."""
    model_size: str = "8b"
    """Size of the model for `gpu`: 1b, 3b, 8b, 32b or 70b."""

    def profile(self) -> CostProfile | None:
        """Return the profile. Raises UserError for a file that cannot be read, and for unknown names."""
        from ssd.budget.cost_profile import CostProfile
        from ssd.budget.roofline import roofline

        if self.cost_profile is not None:
            return CostProfile.read(self.cost_profile)
        return roofline(self.gpu, self.model_size) if self.gpu is not None else None


@dataclass(frozen=True)
class ServiceConfig:
    """Settings of the service."""

    listen: Annotated[str, Flag(metavar="ADDRESS")] = DEFAULT_ADDRESS
    """Address: unix:/path/to/socket or host:port; port 0 selects a free one."""
    drafting: DrafterConfig = field(default_factory=DrafterConfig)
    steps: StepsConfig = field(default_factory=StepsConfig)
    namespaces: NamespacesConfig = field(default_factory=NamespacesConfig)
    limits: Limits = field(default_factory=Limits)
    access: AccessConfig = field(default_factory=AccessConfig)
    snapshots: SnapshotsConfig = field(default_factory=SnapshotsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    reports: ReportsConfig = field(default_factory=ReportsConfig)

    def __post_init__(self) -> None:
        """Raise ValueError for contradictory settings."""
        from ssd.corpus.ring import check_capacity

        capacities = {"drafting.capacity": self.drafting.capacity}
        capacities |= {f"namespaces.capacities.{name}": size for name, size in self.namespaces.capacities.items()}
        for key, capacity in capacities.items():
            try:
                check_capacity(capacity)
            except ValueError as problem:
                raise ValueError(f"{key}: {problem}") from None


SETTINGS = Schema(ServiceConfig, without=("drafting.options",))
"""Third-party drafters have options, and the service has none of them."""


# --- Loading

PREFIX = "SSD_DRAFTER_"
"""Prefix of environment variables, such as SSD_DRAFTER_DRAFTING__CAPACITY for the key drafting.capacity. Empty ones are
ignored."""

KUBERNETES = re.compile(PREFIX + r"(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_(TCP|UDP).*)?)")
"""Variables that Kubernetes sets in every pod if there is a Service called ssd-drafter."""


def load_settings(
    file: Path | None = None, flags: Mapping[str, Any] | None = None, environment: Mapping[str, str] = os.environ
) -> ServiceConfig:
    """Return the settings; `flags` by dotted key, such as "drafting.capacity". Raises UserError that names the key."""
    variables = {
        name.removeprefix(PREFIX).lower().replace("__", "."): _parse_value(value)
        for name, value in environment.items()
        if name.startswith(PREFIX) and value and not KUBERNETES.fullmatch(name)
    }
    layers = {} if file is None else {str(file): read_toml(file)}
    return SETTINGS.load({**layers, f"environment variables {PREFIX}...": variables, "flags": flags or {}})


def read_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """Return the values of KEY=VALUE texts by key. Raises UserError for another text."""
    flat = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"{text!r} is not of the form KEY=VALUE, such as limits.streams=64")
        flat[key.strip()] = _parse_value(value.strip())
    return flat


def _parse_value(text: str) -> Any:
    """Parse a TOML table or array; other values remain text until their type is known."""
    if not text.startswith(("{", "[")):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
