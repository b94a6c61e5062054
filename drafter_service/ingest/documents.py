"""Data of a load: items that readers yield, documents that sinks learn, and counts of what could not be read."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from drafter_service.ingest.origins import Origin
from ssd.corpus.rollout import NO_TAG

Part = str | np.ndarray
"""A part of a record: text, or token ids, uint32 [N]."""

MAX_PLACES = 3
"""Number of places stored for each reason."""
SAMPLES, SAMPLE_SIZE = 2, 200
"""Number of outputs stored for each format, and of their first characters or tokens."""

NO_TOKENIZER = "text, but no --tokenizer to read it with"
NO_TOKENS = "an output without tokens"


class Item(NamedTuple):
    """A document, perhaps not tokenized yet."""

    name: str
    prompt: Part | None
    """The last part of the prompt, or the whole prompt with `Reading.whole_prompts`."""
    output: Part
    origin: Origin | None = None
    """Time, user and session, with `Reading.has_origins`."""
    time: float = math.nan
    """When it was first learned, in seconds since 1970; NaN: now."""
    tag: int = NO_TAG
    """That of a rollout, see `ssd.corpus.rollout.Rollout.tag`."""

    @property
    def nbytes(self) -> int:
        """Approximate memory in bytes."""
        return _size(self.prompt) + _size(self.output)


def _size(part: Part | None) -> int:
    return part.nbytes if isinstance(part, np.ndarray) else len(part or "")


@dataclass(frozen=True, eq=False)
class Documents:
    """D documents as token ids. Each is an output after its prompt, if it has one: the whole prompt or its end."""

    tokens: np.ndarray
    """uint32 [T]."""
    offsets: np.ndarray
    """uint32 [D + 1]: document i is `tokens[offsets[i]:offsets[i + 1]]`; none is empty."""
    names: list[str]
    """D request names, by which documents are forgotten, and recognized when they are loaded again."""
    prompt_lengths: np.ndarray
    """uint32 [D]: number of tokens of the prompt in each document."""
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


class Sample(NamedTuple):
    """Documents of one format."""

    documents: int
    outputs: list[Part]
    """The beginnings of the first ones."""
    place: str
    """Name of the first one."""


class Samples:
    """Documents by format. One thread writes them, any may read them."""

    def __init__(self) -> None:
        self.by_format: dict[str, Sample] = {}

    def add(self, name: str, items: Sequence[Item]) -> None:
        """Count documents of a format."""
        if items:
            sample = self.by_format.get(name) or Sample(0, [], items[0].name)
            outputs = sample.outputs
            if len(outputs) < SAMPLES:
                beginnings = (item.output[:SAMPLE_SIZE] for item in items[: SAMPLES - len(outputs)])
                outputs = [*outputs, *map(copy, beginnings)]  # Slices of arrays would keep the arrays in memory.
            self.by_format[name] = Sample(sample.documents + len(items), outputs, sample.place)
