"""Limits of a host, and options and ends of its requests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
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
    "ssd_group": str,
    "ssd_version": int,
}
"""Options that a client of the host may give with a request, and their types; and `hints`."""
MAX_HINT_TOKENS = 1 << 15
"""Maximum number of tokens of a request's hints: a step needs a few milliseconds to start a request with so many."""
MAX_HINT_CHARS = 1 << 17
"""Maximum number of characters of hints that are texts."""
MAX_HINT_TEXTS = 64


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
    has_network: bool = False
    """Whether it has a network of its own, such as EAGLE or MTP, whose drafts it gives to `HostSession.draft`."""

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
    hints: Sequence[int] = ()
    """Tokens that its output may repeat, such as the file that it edits, or an array of them. They are searched like
    its prompt."""
    hint_texts: tuple[str, ...] = ()
    """The same as texts, which are not tokenized yet."""
    rollout: Rollout | None = None
    """What it samples in reinforcement learning; None if it is no rollout."""

    def with_extras(
        self, extras: Mapping[str, Any], group: str | None = None, warn: Callable[[str], None] = lambda _: None
    ) -> RequestOptions:
        """Return the options with those of `EXTRAS` that a client gave. Raises ValueError for a value of a wrong type,
        and for texts, also of the options themselves, that have no encoding in UTF-8.

        Other names are left to the host. group: that of a rollout whose client gave none; None: it is no rollout. warn:
        called if hints are longer than the limits, which cuts them.
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
        texts = {"cache_salt": self.salt, "user": self.user, "ssd_session": self.session, **given}
        for name, text in texts.items():
            try:  # JSON may have lone surrogates.
                if EXTRAS.get(name, str) is str:
                    text.encode()
            except (AttributeError, UnicodeEncodeError):
                raise ValueError(f"{name} must be text that has an encoding in UTF-8") from None
        hints = () if (hints := extras.get("hints")) is None else _read_hints(hints, warn)
        is_text = bool(hints) and isinstance(hints[0], str)
        return replace(
            self,
            private=given.get("ssd_private", self.private),
            session=given.get("ssd_session", self.session),
            max_draft=given.get("ssd_max_draft", self.max_draft),
            hints=self.hints if is_text or not hints else hints,
            hint_texts=hints if is_text else self.hint_texts,
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


def _read_hints(hints: Any, warn: Callable[[str], None]) -> tuple[Any, ...]:
    """Return hints within the limits, all of them texts or token ids. Raises ValueError for anything else."""
    given: list[Any] = [hints] if isinstance(hints, str) else hints
    if not isinstance(given, list):
        raise ValueError(f"hints must be a text, texts or token ids, not {type(hints).__name__}")
    kind, most = (str, MAX_HINT_TEXTS) if given and isinstance(given[0], str) else (int, MAX_HINT_TOKENS)
    kept = given[:most]
    if not all(type(each) is kind for each in kept):
        raise ValueError("hints must be a text, a list of texts, or a list of token ids")
    room = MAX_HINT_CHARS
    for at, text in enumerate(kept if kind is str else ()):
        kept[at] = text[: max(0, room)]
        room -= len(text)
    if room < 0 or len(kept) < len(given):
        warn(
            f"hints beyond {MAX_HINT_TOKENS:,} tokens, or {MAX_HINT_TEXTS} texts of {MAX_HINT_CHARS:,} characters in "
            "all, are ignored"
        )
    return tuple(filter(None, kept)) if kind is str else tuple(kept)


def group_of(prompt: np.ndarray) -> str:
    """Return a group that is named after a prompt, int64 [N], so that it is the same for all samples in all epochs."""
    return hashlib.blake2b(prompt.data, digest_size=16).hexdigest()


def _rollout(group: str | None, version: int) -> Rollout | None:
    """Return what a request samples; None without a group. Raises ValueError for one that is too long."""
    try:
        return None if group is None else Rollout(group, version)
    except ValueError as problem:
        raise ValueError(f"ssd_{problem}") from None
