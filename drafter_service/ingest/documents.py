"""Data of a load: items that readers yield, their origins, documents that sinks learn, counts of what is skipped."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from drafter_service.ingest.chats import words
from ssd.corpus.rollout import NO_TAG

Part = str | np.ndarray
"""A part of a record: text, or token ids, uint32 [N]."""

MAX_PLACES = 3
"""Number of places stored for each reason."""
SAMPLES, SAMPLE_SIZE = 2, 200
"""Number of outputs stored for each format, and of their first characters or tokens."""

NO_TOKENIZER = "text, but no --tokenizer to read it with"
NO_TOKENS = "an output without tokens"


class Origin(NamedTuple):
    """Time, user and session of a request; None where a log does not have them."""

    began_s: float | None = None
    """Seconds since the epoch."""
    ended_s: float | None = None
    user: str | None = None
    session: str | None = None


class Item(NamedTuple):
    """A document, perhaps not tokenized yet."""

    place: str
    """FILE:NUMBER of its record, for messages."""
    prompt: Part | None
    """The last part of the prompt, or the whole prompt with `Reading.for_replay`."""
    output: Part
    origin: Origin | None = None
    """Time, user and session, with `Reading.for_replay`."""
    time: float = math.nan
    """When it was first learned, in seconds since 1970; NaN: now."""
    tag: int = NO_TAG
    """Tag of a rollout, see `ssd.corpus.rollout.Rollout.tag`."""
    name: str = ""
    """Name by which it is forgotten, and recognized when it is loaded again; see `Reading.named`."""

    @property
    def nbytes(self) -> int:
        """Approximate memory in bytes."""
        parts = (self.prompt, self.output)
        return sum(part.nbytes if isinstance(part, np.ndarray) else len(part or "") for part in parts)


@dataclass(frozen=True, eq=False)
class Documents:
    """D documents as token ids. Each is an output after its prompt, if it has one: the whole prompt or its end."""

    tokens: np.ndarray
    """uint32 [T]."""
    offsets: np.ndarray
    """uint32 [D + 1]: document i is `tokens[offsets[i]:offsets[i + 1]]`; none is empty."""
    names: list[str]
    """D request names, by which documents are forgotten, and recognized when they are loaded again."""
    times: np.ndarray
    """float64 [D]: `Item.time`."""
    tags: np.ndarray
    """uint32 [D]: `Item.tag`."""

    def __len__(self) -> int:
        return len(self.names)


class Totals(NamedTuple):
    """Totals of the documents of a load."""

    documents: int
    tokens: int
    duplicates: int
    """Documents that were skipped because one of the same name has been learned before."""


class Sink(Protocol):
    """A corpus that learns the documents of a load, local or of a running service."""

    saved: str
    """Whether the documents are on disk, and what to do if not; set by `finish`."""

    def accept(self, documents: Documents) -> None:
        """Learn documents. Blocks while the sink is busy."""

    def finish(self) -> Totals:
        """Wait until all accepted documents are stored."""


# --- What is found, and what is skipped


class RecordError(Exception):
    """A record cannot be learned. The message is one of a fixed set of reasons and contains no user data."""


@dataclass
class Fault:
    """Records that were skipped for one reason."""

    count: int = 0
    places: list[str] = field(default_factory=list)
    """The first ones, as FILE:LINE or FILE."""


class Faults:
    """Skipped records and files by reason. Any thread may write them."""

    def __init__(self) -> None:
        self.by_reason: dict[str, Fault] = {}
        self._lock = threading.Lock()

    def record(self, reason: str, place: str) -> None:
        """Count a record that was skipped."""
        with self._lock:
            fault = self.by_reason.setdefault(reason, Fault())
            fault.count += 1
            if len(fault.places) < MAX_PLACES:
                fault.places.append(place)

    @property
    def count(self) -> int:
        """Number of all skipped records."""
        return sum(fault.count for fault in self.by_reason.values())

    @property
    def summary(self) -> str:
        """All reasons in one line, each with the first place where it occurred; "" without faults."""
        return "; ".join(f"{reason} ({fault.places[0]})" for reason, fault in self.by_reason.items())


@dataclass
class Sample:
    """Documents of one format. One thread adds them, any may read them."""

    first: Item
    """The first one, without its text."""
    documents: int = 0
    outputs: list[Part] = field(default_factory=list)
    """The beginnings of the first ones."""

    def add(self, items: Sequence[Item]) -> None:
        """Count documents."""
        self.documents += len(items)
        for item in items[: SAMPLES - len(self.outputs)]:
            self.outputs.append(copy(item.output[:SAMPLE_SIZE]))  # Slices of arrays would keep the arrays in memory.


# --- Origins: times, users and sessions in the fields that logs commonly have

Value = TypeVar("Value")

BEGAN = words("timestamp time ts created_at createdAt start_time startTime started_at request_time created tstamp")
ENDED = words("end_time endTime ended_at finished_at completed_at completedAt response_time")
SECONDS, MILLISECONDS = words("latency latency_s duration duration_s"), ("latency_ms", "duration_ms")
"""Fields with the duration of a request."""
USERS = words("user user_id userId end_user safety_identifier")
SESSIONS = words(
    "session_id sessionId session conversation_id conversationId chat_id chatId thread_id threadId trace_id traceId"
)
PLACES = ("request", "body", "response", "metadata")
"""Fields with objects that may have these, too."""
ORIGIN_FIELDS = frozenset((*BEGAN, *ENDED, *SECONDS, *MILLISECONDS, *USERS, *SESSIONS, "metadata"))
"""Names of all fields that are read for an origin."""
UNITS = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))
"""Times above the first number are in the second unit: nanoseconds, microseconds, milliseconds; others in seconds."""


def origin_of(record: object) -> Origin:
    """Return what a record, or the request and the response in it, say of the origin."""
    if not isinstance(record, dict):
        return Origin()
    places = [record, *(record[name] for name in PLACES if name in record)]
    places += [place["metadata"] for place in places[1:] if isinstance(place, dict) and "metadata" in place]
    objects = [place for place in places if isinstance(place, dict)]
    began, ended = _first(objects, BEGAN, _time), _first(objects, ENDED, _time)
    if ended is None and began is not None:
        duration, ms = (_first(objects, names, _number) for names in (SECONDS, MILLISECONDS))
        duration = ms / 1e3 if duration is None and ms is not None else duration
        ended = None if duration is None else began + duration
    return Origin(began, ended, _first(objects, USERS, _name), _first(objects, SESSIONS, _name))


def _first(objects: Iterable[Any], names: Iterable[str], convert: Callable[[object], Value | None]) -> Value | None:
    """Return the first of the fields, in one of the objects, that can be converted."""
    values = (convert(place.get(name)) for name in names for place in objects)
    return next((value for value in values if value is not None), None)


def _time(value: object) -> float | None:
    """Return a time in seconds since the epoch, from a number or ISO 8601; UTC where no zone is given.

    None before it, as for the zero time of Go.
    """
    if isinstance(value, str):
        text, value = value, None
        for convert in (float, datetime.fromisoformat):
            with suppress(ValueError):
                value = convert(text)
    if isinstance(value, datetime):
        value = (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        return value if value >= 0 else None
    number = _number(value)
    return None if number is None else number * next((unit for least, unit in UNITS if number > least), 1.0)


def _number(value: object) -> float | None:
    """Return a finite number that is not negative."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= sys.float_info.max else None  # type: ignore[arg-type,operator]


def _name(value: object) -> str | None:
    is_name = isinstance(value, str | int) and not isinstance(value, bool) and value != ""
    return str(value) if is_name else None
