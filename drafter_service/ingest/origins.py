"""Read the times, user and session of a recorded request from the fields that logs commonly have."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from drafter_service.ingest.chats import words

Record = dict[str, Any]

BEGAN = words("timestamp time ts created_at createdAt start_time startTime started_at request_time created tstamp")
ENDED = words("end_time endTime ended_at finished_at completed_at completedAt response_time")
SECONDS = {name + unit: {"_ms": 1e-3}.get(unit, 1.0) for unit in ("", "_s", "_ms") for name in ("latency", "duration")}
"""Fields with the duration of a request, and their units in seconds."""
USERS = words("user user_id userId end_user safety_identifier")
SESSIONS = words("session_id sessionId session conversation_id chat_id thread_id trace_id traceId")
PLACES = ("request", "body", "response", "metadata")
"""Fields with objects that may have these, too."""
FIELDS = frozenset((*BEGAN, *ENDED, *SECONDS, *USERS, *SESSIONS, "metadata"))
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
    began = _first(map(_time, _values(objects, BEGAN)))
    ended = _first(map(_time, _values(objects, ENDED)))
    if ended is None and began is not None:
        durations = (_number(value, unit) for name, unit in SECONDS.items() for value in _values(objects, (name,)))
        duration = _first(durations)
        ended = None if duration is None or duration < 0 else began + duration
    user, session = (_first(map(_name, _values(objects, names))) for names in (USERS, SESSIONS))
    return Origin(began, ended, user, session)


def _values(objects: Iterable[Record], names: Iterable[str]) -> Iterable[object]:
    return [place[name] for name in names for place in objects if place.get(name) is not None]


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def _time(value: object) -> float | None:
    """Return a time in seconds since the epoch, from a number or ISO 8601; UTC where no zone is given."""
    if isinstance(value, datetime):
        return _stamp(value)
    if isinstance(value, str):
        try:
            return _stamp(datetime.fromisoformat(value))
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                return None
    number = _number(value, 1.0)
    if number is None or number < 0:
        return None
    return number * next((unit for least, unit in UNITS if number > least), 1.0)


def _stamp(moment: datetime) -> float | None:
    """Return a moment in seconds since the epoch; None before it, as for the zero time of Go."""
    seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return seconds if seconds >= 0 else None


def _number(value: object, unit: float) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) * unit if is_number else None  # type: ignore[arg-type]


def _name(value: object) -> str | None:
    is_name = isinstance(value, str | int) and not isinstance(value, bool) and value != ""
    return str(value) if is_name else None
