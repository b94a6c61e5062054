"""What has passed through the log of a namespace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass
class LogCounters:
    """Totals since this replica began. Only the event loop writes them."""

    published_requests: int = 0
    """Finished requests that Redis has."""
    published_tokens: int = 0
    consumed_requests: int = 0
    """Finished requests of other replicas that were handed on."""
    consumed_tokens: int = 0
    duplicates: int = 0
    """Finished requests that had come before."""
    outdated: int = 0
    """Finished requests that came after what said that they are to be forgotten."""
    dropped: int = 0
    """Finished requests that were never published, because too many waited."""
    malformed: int = 0
    """Entries that were skipped."""
    gaps: int = 0
    """Times that entries may have been missed: trimmed before they were read, or lost with Redis."""
    errors: int = 0
    """Attempts to write or read that failed; each was made again."""


class Lag(NamedTuple):
    """How far a reader is behind the newest entry."""

    entries: int
    """An estimate: entries are taken to be evenly spread over time."""
    seconds: float
