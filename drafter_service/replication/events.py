"""What replicas tell each other."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A request has finished and may be learned."""

    request: str
    """Its name, by which it is learned only once and forgotten. Empty: it has none, and neither holds."""
    tokens: np.ndarray
    """uint32 [N]."""
    time: float
    """When, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What a request produced until `time` is to be forgotten."""

    request: str
    time: float
    """When this was asked for, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class ForgottenBefore:
    """Everything that finished before `time` is to be forgotten."""

    time: float
    """In seconds since 1970; finite."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.time):
            raise ValueError(f"time is {self.time}, not finite")


@dataclass(frozen=True, slots=True)
class Dropped:
    """The namespace with all that finished until `time` is to be forgotten."""

    time: float
    """When this was asked for, in seconds since 1970."""


Event = Finished | Forgotten | ForgottenBefore | Dropped
