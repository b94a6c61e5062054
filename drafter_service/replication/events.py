"""Events that replicas exchange, and their encoding as entries of the log.

An entry has the columns of N events, packed as little-endian bytes: kinds u1 [N], times f8 [N], lengths u4 [N] of the
events' tokens, tokens u4 (all events), name_lengths u4 [N] in bytes, names in UTF-8 (all events), tags u4 [N]. No other
module depends on the format. Entries may come from other versions, so `decode` validates everything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from drafter_service.transport.wire import WireError, pack, unpack, unpack_tokens
from ssd.corpus.rollout import NO_TAG

VERSION = b"1"
FINISHED, FORGOTTEN, FORGOTTEN_BEFORE, DROPPED = range(4)
NO_TOKENS = np.empty(0, np.uint32)


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A request has finished and may be learned."""

    request: str
    """Name of the request, which is learned once per name and can be forgotten by it. Empty: no name."""
    tokens: np.ndarray
    """uint32 [N]."""
    time: float
    """Time of finishing, in seconds since 1970."""
    tag: int = NO_TAG
    """That of a rollout, see `ssd.corpus.rollout.Rollout.tag`."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Forget the text that a request produced up to `time`."""

    request: str
    time: float
    """Time of the request to forget, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class ForgottenBefore:
    """Forget everything that finished before `time`."""

    time: float
    """Time in seconds since 1970; finite."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.time):
            raise ValueError(f"time is {self.time}, not finite")


@dataclass(frozen=True, slots=True)
class Dropped:
    """Forget the namespace with everything that finished up to `time`."""

    time: float
    """Time of the request to forget, in seconds since 1970."""


Event = Finished | Forgotten | ForgottenBefore | Dropped

KINDS = {Finished: FINISHED, Forgotten: FORGOTTEN, ForgottenBefore: FORGOTTEN_BEFORE, Dropped: DROPPED}


class LogEntry(NamedTuple):
    """A decoded entry."""

    writer: bytes
    """Name of the replica that wrote it."""
    events: list[Event]


def encode(events: Sequence[Event], writer: bytes) -> dict[bytes, bytes]:
    """Return the fields of an entry."""
    tokens = [event.tokens if isinstance(event, Finished) else NO_TOKENS for event in events]
    names = [
        event.request.encode(errors="surrogatepass") if isinstance(event, Finished | Forgotten) else b""
        for event in events
    ]
    return {
        b"version": VERSION,
        b"writer": writer,
        b"kinds": pack(np.array([KINDS[type(event)] for event in events]), "u1"),
        b"times": pack(np.array([event.time for event in events], np.float64), "f8"),
        b"lengths": pack(np.array([len(part) for part in tokens]), "u4"),
        b"tokens": pack(np.concatenate(tokens), "u4"),
        b"name_lengths": pack(np.array([len(name) for name in names]), "u4"),
        b"names": b"".join(names),
        b"tags": pack(np.array([event.tag if isinstance(event, Finished) else NO_TAG for event in events]), "u4"),
    }


def decode(fields: Mapping[bytes, bytes]) -> LogEntry:
    """Return the entry that the fields encode; its tokens are views of them. Raises WireError for invalid fields."""
    if _field(fields, "version") != VERSION:
        raise WireError("the entry has another version")
    kinds = unpack(_field(fields, "kinds"), "u1", "kinds")
    if not len(kinds):
        raise WireError("kinds is empty")
    times = unpack(_field(fields, "times"), "f8", "times")
    if len(times) != len(kinds) or not np.all(np.isfinite(times)):
        raise WireError(f"times must be {len(kinds)} finite numbers")
    tokens = unpack_tokens(_field(fields, "tokens"), "tokens")
    names = _field(fields, "names")
    ends = _ends(fields, "lengths", len(kinds), len(tokens))
    name_ends = _ends(fields, "name_lengths", len(kinds), len(names))
    tags = unpack(_field(fields, "tags"), "u4", "tags")
    if len(tags) != len(kinds) or (tags >> 16).any():
        raise WireError(f"tags must be {len(kinds)} numbers of 16 bits")
    events, first, first_name = [], 0, 0
    for kind, time, end, name_end, tag in zip(
        kinds.tolist(), times.tolist(), ends.tolist(), name_ends.tolist(), tags.tolist(), strict=True
    ):
        events.append(_event(kind, names[first_name:name_end], tokens[first:end], time, tag))
        first, first_name = end, name_end
    return LogEntry(_field(fields, "writer"), events)


def _event(kind: int, name: bytes, tokens: np.ndarray, time: float, tag: int) -> Event:
    if kind == FINISHED:
        return Finished(_text(name), tokens, time, tag)
    if kind == FORGOTTEN:
        return Forgotten(_text(name), time)
    if kind == FORGOTTEN_BEFORE:
        return ForgottenBefore(time)
    if kind == DROPPED:
        return Dropped(time)
    raise WireError(f"kinds contains {kind}")


def _text(name: bytes) -> str:
    try:
        return name.decode(errors="surrogatepass")
    except UnicodeDecodeError:
        raise WireError("names is not UTF-8") from None


def _ends(fields: Mapping[bytes, bytes], name: str, number: int, total: int) -> np.ndarray:
    lengths = unpack(_field(fields, name), "u4", name)
    ends = np.cumsum(lengths, dtype=np.int64)
    if len(lengths) != number or int(ends[-1]) != total:
        raise WireError(f"{name} must be {number} lengths with the sum {total}")
    return ends


def _field(fields: Mapping[bytes, bytes], name: str) -> bytes:
    try:
        return fields[name.encode()]
    except KeyError:
        raise WireError(f"{name} is missing") from None
