"""Read the times, user and session of a recorded request from the fields that logs commonly have."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from drafter_service.ingest.chats import words

Record = dict[str, Any]
Value = TypeVar("Value")

BEGAN = words("timestamp time ts created_at createdAt start_time startTime started_at request_time created tstamp")
ENDED = words("end_time endTime ended_at finished_at completed_at completedAt response_time")
SECONDS, MILLISECONDS = words("latency latency_s duration duration_s"), ("latency_ms", "duration_ms")
"""Fields with the duration of a request."""
USERS = words("user user_id userId end_user safety_identifier")
SESSIONS = words("session_id sessionId session conversation_id chat_id thread_id trace_id traceId")
PLACES = ("request", "body", "response", "metadata")
"""Fields with objects that may have these, too."""
FIELDS = frozenset((*BEGAN, *ENDED, *SECONDS, *MILLISECONDS, *USERS, *SESSIONS, "metadata"))
"""Names of all fields that are read."""
UNITS = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))
"""Times above the first number are in the second unit: nanoseconds, microseconds, milliseconds; others in seconds."""


class Origin(NamedTuple):
    """Time, user and session of a request; None where a log does not have them."""

    began_s: float | None = None
    """Seconds since the epoch."""
    ended_s: float | None = None
    user: str | None = None
    session: str | None = None


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


def _first(objects: Iterable[Record], names: Iterable[str], convert: Callable[[object], Value | None]) -> Value | None:
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
