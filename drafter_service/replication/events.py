"""Events that sidecars exchange, and their encoding as entries of the log.

An entry has the columns of N events, packed as little-endian bytes: kinds u1 [N], times f8 [N], lengths u4 [N] of the
events' tokens, tokens u4 (all events), name_lengths u4 [N] in bytes, names in UTF-8 (all events), tags u4 [N]. No other
module depends on the format. Entries may come from other versions, so `decode` validates everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from drafter_service.transport.wire import WireError, pack, unpack, unpack_tokens
from ssd.corpus.rollout import NO_TAG

VERSION = b"1"
NO_TOKENS = np.empty(0, np.uint32)


class Kind(IntEnum):
    """Kind of an event."""

    FINISHED = 0
    """A request has finished at `time` and may be learned."""
    FORGOTTEN = 1
    """The text that a request produced up to `time` is to be forgotten."""
    FORGOTTEN_BEFORE = 2
    """Everything that finished before `time` is to be forgotten."""
    DROPPED = 3
    """Everything is to be forgotten that finished before `time` or is in an earlier entry."""


class Event(NamedTuple):
    """A change of what a namespace remembers."""

    kind: Kind
    time: float
    """In seconds since 1970; finite."""
    request: str = ""
    """Name of the request, which is learned once per name and can be forgotten by it. Empty: no name."""
    tokens: np.ndarray = NO_TOKENS
    """uint32 [N]: the text of a finished request."""
    tag: int = NO_TAG
    """Tag of a rollout, see `ssd.corpus.rollout.Rollout.tag`."""


class LogEntry(NamedTuple):
    """A decoded entry."""

    writer: bytes
    """Name of the sidecar that wrote it."""
    events: list[Event]


def encode(events: Sequence[Event], writer: bytes) -> dict[bytes, bytes]:
    """Return the fields of an entry."""
    kinds, times, requests, tokens, tags = zip(*events, strict=True)
    names = [request.encode(errors="surrogatepass") for request in requests]
    return {
        b"version": VERSION,
        b"writer": writer,
        b"kinds": pack(np.array(kinds), "u1"),
        b"times": pack(np.array(times, np.float64), "f8"),
        b"lengths": pack(np.array([len(part) for part in tokens]), "u4"),
        b"tokens": pack(np.concatenate(tokens), "u4"),
        b"name_lengths": pack(np.array([len(name) for name in names]), "u4"),
        b"names": b"".join(names),
        b"tags": pack(np.array(tags), "u4"),
    }


def decode(fields: Mapping[bytes, bytes]) -> LogEntry:
    """Return the entry that the fields encode; its tokens are views of them. Raises WireError for invalid fields."""
    if _field(fields, "version") != VERSION:
        raise WireError("the entry has another version")
    kinds = unpack(_field(fields, "kinds"), "u1", "kinds").tolist()
    if not kinds or max(kinds) >= len(Kind):
        raise WireError(f"kinds must be numbers below {len(Kind)}")
    times = unpack(_field(fields, "times"), "f8", "times")
    if len(times) != len(kinds) or not np.all(np.isfinite(times)):
        raise WireError(f"times must be {len(kinds)} finite numbers")
    tokens = unpack_tokens(_field(fields, "tokens"), "tokens")
    names = _field(fields, "names")
    runs = _runs(fields, "lengths", len(kinds), len(tokens))
    name_runs = _runs(fields, "name_lengths", len(kinds), len(names))
    tags = unpack(_field(fields, "tags"), "u4", "tags")
    if len(tags) != len(kinds) or (tags >> 16).any():
        raise WireError(f"tags must be {len(kinds)} numbers of 16 bits")
    try:
        requests = [names[run].decode(errors="surrogatepass") for run in name_runs]
    except UnicodeDecodeError:
        raise WireError("names is not UTF-8") from None
    columns = zip(map(Kind, kinds), times.tolist(), requests, [tokens[run] for run in runs], tags.tolist(), strict=True)
    return LogEntry(_field(fields, "writer"), [Event(*row) for row in columns])


def forgets(fields: Mapping[bytes, bytes]) -> bool:
    """Return whether an entry of this version has events that forget text, without decoding it."""
    return fields.get(b"version") == VERSION and any(kind != Kind.FINISHED for kind in fields.get(b"kinds", b""))


def forgets_all(fields: Mapping[bytes, bytes]) -> bool:
    """Return whether an entry forgets everything that was in earlier ones."""
    return forgets(fields) and fields[b"kinds"][0] == Kind.DROPPED


def _runs(fields: Mapping[bytes, bytes], name: str, number: int, total: int) -> list[slice]:
    """Return where each event's part of a column is. Raises WireError if the lengths do not fit."""
    lengths = unpack(_field(fields, name), "u4", name)
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    if len(lengths) != number or ends[-1] != total:
        raise WireError(f"{name} must be {number} lengths with the sum {total}")
    return [slice(first, end) for first, end in pairwise([0, *ends])]


def _field(fields: Mapping[bytes, bytes], name: str) -> bytes:
    try:
        return fields[name.encode()]
    except KeyError:
        raise WireError(f"{name} is missing") from None
