"""Options of each kind of drafter (`--drafter-option`), and resources of the engine that drafters are built from."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_type_hints

if TYPE_CHECKING:
    from engine.drafters.base import TargetInfo

LOG = logging.getLogger(__name__)
T = TypeVar("T")
DEFAULT_ADDRESS = "unix:/tmp/ssd-drafter.sock"


@dataclass(frozen=True)
class Resources:
    """Resources that drafters are built from, besides their settings."""

    target: TargetInfo | None = None
    """The target; some drafters do not need it."""
    draft_models: Mapping[str, Path] = field(default_factory=dict)
    """Folders of weights by kind."""
    address: str = DEFAULT_ADDRESS
    """Address of a sidecar."""
    require_sidecar: bool = True
    """Whether a sidecar must answer at the start; otherwise there are no drafts until one does."""
    warn: Callable[[str], None] = LOG.warning
    """Called whenever the connection to the sidecar is lost, and when it is restored."""
    notify: Callable[[str], None] = LOG.info
    """Called with the namespace of a sidecar."""
    is_combined: bool = False
    """Whether several drafters are built whose drafts are merged."""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """Folders of the LoRA adapters that requests may choose, by name."""
    adapter: Path | None = None
    """Folder of the LoRA adapter whose requests the drafter serves; None: requests without one."""


@dataclass(frozen=True)
class RemoteOptions:
    """Options of `ssd-remote`."""

    deadline_s: float = 0.01
    """Longest time that a step waits for drafts, in seconds; the default is a fraction of a step on a CPU."""
    drafting: Literal["sidecar", "replica"] = "sidecar"
    """Place where drafts are made; `replica`: in a copy of the sidecar's corpus in this process."""
    namespace: str = ""
    """Namespace of requests without adapter, in place of the default one of the model."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 <= self.deadline_s < math.inf:
            raise ValueError(f"deadline_s must be a number of seconds, not {self.deadline_s}")
        if self.drafting not in ("sidecar", "replica"):
            raise ValueError(f"drafting must be 'sidecar' or 'replica', not {self.drafting!r}")


@dataclass(frozen=True)
class NetworkOptions:
    """Options of the kinds that run a network."""

    depth: int = 5
    """Largest number of draft positions; where the acceptance is low, fewer are drafted."""

    def __post_init__(self) -> None:
        """Check the range."""
        if self.depth < 1:
            raise ValueError(f"depth must be a whole number from 1, not {self.depth}")


@dataclass(frozen=True)
class LookaheadOptions:
    """Sizes of lookahead decoding."""

    window: int = 7
    """Number of columns (W in the paper)."""
    ngram: int = 5
    """Number of tokens of an n-gram (N), 2 or more; the window has one level less."""
    candidates: int = 4
    """Largest number of n-grams that a step verifies (G)."""

    def __post_init__(self) -> None:
        """Check all ranges."""
        for name, least, most in (("window", 2, 64), ("ngram", 2, 16), ("candidates", 1, 64)):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be {least} to {most}, not {getattr(self, name)}")

    @property
    def rows(self) -> int:
        """Number of extra rows of a window whose levels are all filled."""
        return self.window * (self.ngram - 1) - 1


@dataclass(frozen=True)
class RestOptions:
    """Options of `rest`."""

    path: Path | None = None
    """Snapshot of its corpus."""


def read_options(kind: type[T], options: Mapping[str, str]) -> T:
    """Return a dataclass with those of the options that are its fields. Raises ValueError for an invalid value."""
    return kind(**converted(kind, options))


def converted(kind: type, options: Mapping[str, str]) -> dict[str, Any]:
    """Return those of the options that are fields of a dataclass, converted to the types of the fields.

    Raises ValueError for text that is not of this type.
    """
    hints = get_type_hints(kind)
    return {name: _value(name, hints[name], text) for name, text in options.items() if name in hints}


def _value(name: str, hint: Any, text: str) -> object:
    [kind, *_] = [each for each in get_args(hint) if each is not NoneType] or [hint]
    if kind in (int, float, Path):
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"{name} must be a {'whole ' * (kind is int)}number, not {text!r}") from None
    return text
