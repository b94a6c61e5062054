"""Limits of a host, and options and ends of its requests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import numpy as np

from ssd.budget.padding import NO_PADDING, Padding
from ssd.corpus.rollout import Rollout

EXTRAS = {
    "ssd_private": bool,
    "ssd_session": str,
    "ssd_max_draft": int,
    "hints": list,
    "ssd_group": str,
    "ssd_version": int,
}
"""Options that a client of the host may give with a request, and their types."""


class End(Enum):
    """How a request ended, as far as the host says."""

    FINISHED = auto()
    """By a stop token, a stop string or its maximum length."""
    CANCELLED = auto()
    """By its client, or by an error."""
    ABORTED = auto()
    """By a stop string or by a cancellation: the host reports both alike."""


@dataclass(frozen=True)
class HostLimits:
    """Largest values that a host accepts."""

    max_draft: int
    """Tokens in a draft."""
    vocab_size: int
    """Token ids are below this."""
    context_window: int | None = None
    """Tokens of a sequence, prompt included; None: no limit."""
    max_requests: int = 4096
    """Requests that are followed at a time. Beyond these the least recently drafted one has no more drafts, so that
    requests whose end a host does not report take a limited amount of memory."""

    trees: bool = False
    """Whether a draft may be a tree."""
    padding: Padding = NO_PADDING
    """Shapes that it pads its steps to."""

    def __post_init__(self) -> None:
        """Raise ValueError for a limit below 1."""
        for name in ("max_draft", "vocab_size", "context_window", "max_requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")


@dataclass(frozen=True)
class RequestOptions:
    """Options of one request."""

    max_tokens: int | None = None
    """Maximum number of output tokens; None: no limit."""
    has_stop_strings: bool = False
    """Whether a stop string may end it."""
    salt: str = ""
    """The host's cache salt: requests share a corpus only with requests of the same salt."""
    adapter: str = ""
    """Fingerprint of its LoRA adapter; "" without one. Requests of different adapters share no corpus."""
    user: str = ""
    """The end user. Sessions of different users are different ones, whatever their names."""
    session: str = ""
    """Name that the turns of a conversation share; "": none."""
    private: bool = False
    """Whether its text is kept from the corpus, and from drafts for other requests."""
    max_draft: int | None = None
    """Maximum number of draft tokens, 0 for no drafts; None: as the host allows."""
    hints: tuple[int, ...] = ()
    """Tokens that its output may repeat, such as the file that it edits. They are searched like its prompt."""
    rollout: Rollout | None = None
    """What it samples in reinforcement learning; None if it is no rollout."""

    def with_extras(self, extras: Mapping[str, Any], group: str | None = None) -> RequestOptions:
        """Return the options with those of `EXTRAS` that a client gave. Raises ValueError for a value of a wrong type.

        Other names are left to the host. group: that of a rollout whose client gave none; None: it is no rollout.
        """
        given = {name: extras[name] for name in EXTRAS if extras.get(name) is not None}
        for name, value in given.items():
            if EXTRAS[name] is bool and type(value) is int and value in (0, 1):
                # Some hosts read `true` in JSON as 1.
                given[name] = bool(value)
                continue
            # A bool is an int, but not a number of tokens.
            if not isinstance(value, EXTRAS[name]) or (EXTRAS[name] is int and isinstance(value, bool)):
                raise ValueError(f"{name} must be of type {EXTRAS[name].__name__}, not {type(value).__name__}")
        hints = given.get("hints", self.hints)
        if not all(type(token) is int for token in hints):
            raise ValueError("hints must be a list of token ids")
        return replace(
            self,
            private=given.get("ssd_private", self.private),
            session=given.get("ssd_session", self.session),
            max_draft=given.get("ssd_max_draft", self.max_draft),
            hints=tuple(hints),
            rollout=_rollout(given.get("ssd_group", group), given.get("ssd_version", 0)) or self.rollout,
        )

    @property
    def session_id(self) -> str | None:
        """Id of the session, unique per user; None without one. A hash, so that the drafter gets no names."""
        if not self.session:
            return None
        return hashlib.sha256(f"{len(self.user)}:{self.user}{self.session}".encode()).hexdigest()

    def learns_after(self, end: End) -> bool:
        """Return whether the output may be learned: of aborted ones only if a stop string may have ended it."""
        if self.private or end is End.CANCELLED:
            return False
        return end is End.FINISHED or self.has_stop_strings


def group_of(prompt: Sequence[int]) -> str:
    """Return a group that is named after a prompt, so that it is the same for all samples in all epochs."""
    return hashlib.blake2b(np.asarray(prompt, np.int64).tobytes(), digest_size=16).hexdigest()


def _rollout(group: str | None, version: int) -> Rollout | None:
    """Return what a request samples; None without a group. Raises ValueError for one that is too long."""
    try:
        return None if group is None else Rollout(group, version)
    except ValueError as problem:
        raise ValueError(f"ssd_{problem}") from None
