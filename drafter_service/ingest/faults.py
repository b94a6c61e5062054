"""What could not be read, and why: counted, never fatal, and never with any of its content."""

from __future__ import annotations

from dataclasses import dataclass, field

SHOWN = 3
"""Places that are kept of each reason."""

NO_TOKENIZER = "text, and no --tokenizer to read it with"


class RecordError(Exception):
    """A record cannot be learned; the message is the reason, one of a fixed few."""


@dataclass
class Fault:
    """One reason."""

    count: int = 0
    places: list[str] = field(default_factory=list)
    """The first of them, FILE:LINE or FILE."""


class Faults:
    """Counts by reason. One thread writes them."""

    def __init__(self) -> None:
        self.by_reason: dict[str, Fault] = {}

    def note(self, reason: str, place: str) -> None:
        """Something at a place was left out."""
        fault = self.by_reason.setdefault(reason, Fault())
        fault.count += 1
        if len(fault.places) < SHOWN:
            fault.places.append(place)

    @property
    def count(self) -> int:
        """All that was left out."""
        return sum(fault.count for fault in self.by_reason.values())
