"""Read the requests of a log into a `Recording`, in bounded memory: tokens go to a file that is mapped into memory."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

import numpy as np

from drafter_service.ingest.documents import Faults, Item, Origin
from drafter_service.ingest.files import File
from drafter_service.ingest.pipeline import LoadProgress, check_readable, read_all
from drafter_service.ingest.reading import Reading, tokenize
from ssd.errors import UserError
from ssd.replay import Recording

FORMATS = (
    'JSON lines of requests with their responses ({"request": {"messages": [...]}, "response": {"choices": [...]}}), '
    'of prompts and outputs ({"prompt": "...", "completion": "..."}), '
    'or of token ids ({"prompt_token_ids": [...], "output_token_ids": [...]})'
)
"""Formats that a user with an unreadable log is advised to write."""


class Named(NamedTuple):
    """A request of the log as token ids."""

    name: str
    prompt: np.ndarray
    output: np.ndarray
    origin: Origin


@dataclass
class LogFacts:
    """Contents of a log, and anything unusual about it."""

    files: Counter[str] = field(default_factory=Counter)
    """Number of files by format."""
    faults: Faults = field(default_factory=Faults)
    backwards: int = 0
    """Requests that are earlier than the one before them in the log."""
    repeated_names: int = 0
    """Requests whose id an earlier request has."""


class RecordingWriter:
    """Collects requests."""

    def __init__(self, file: BinaryIO) -> None:
        """file: an empty file to write tokens to, which must be open while the requests are in use."""
        self._file = file
        # Two numbers per request each: tokens of prompt and output, times of both ends, numbers of user and session.
        self._lengths, self._times, self._codes = array("q"), array("d"), array("q")
        self._users: dict[str, int] = {}
        self._sessions: dict[str, int] = {}
        self._names: set[int] = set()
        self.facts = LogFacts()

    def __len__(self) -> int:
        return len(self._lengths) // 2

    def add(self, request: Named) -> None:
        """Append a request."""
        self._file.write(request.prompt.tobytes())
        self._file.write(request.output.tobytes())
        self._lengths.extend((len(request.prompt), len(request.output)))
        began, ended, user, session = request.origin
        if self._times and began is not None and began < self._times[-2]:
            self.facts.backwards += 1
        self._times.extend((math.nan if began is None else began, math.nan if ended is None else ended))
        self._codes.extend((_code(self._users, user), _code(self._sessions, session)))
        key = hash(request.name)
        self.facts.repeated_names += key in self._names
        self._names.add(key)

    def finish(self) -> Recording:
        """Return all requests."""
        self._file.flush()
        lengths = np.array(self._lengths, np.int64).reshape(-1, 2)
        times = np.array(self._times, np.float64).reshape(-1, 2)
        codes = np.array(self._codes, np.int64).reshape(-1, 2)
        tokens = np.memmap(self._file, np.uint32, "r") if lengths.any() else np.empty(0, np.uint32)
        (prompts, outputs), (began_s, ended_s), (users, sessions) = lengths.T, times.T, codes.T
        return Recording.from_arrays(
            tokens, prompts, outputs, began_s=began_s, ended_s=ended_s, users=users, sessions=sessions
        )


def _code(codes: dict[str, int], name: str | None) -> int:
    return -1 if name is None else codes.setdefault(name, len(codes))


def read_requests(
    files: Sequence[File], reading: Reading, file: BinaryIO, watch: Callable[[LoadProgress], None]
) -> tuple[Recording, LogFacts]:
    """Read the requests of all files; file: see `RecordingWriter`. `watch` is called after each batch.

    Raises UserError if there are none.
    """
    writer = RecordingWriter(file)
    writer.facts.files, writer.facts.faults = reading.kinds, reading.faults
    tokens = 0
    with closing(read_all(files, reading, _named)) as batches:
        for bytes_read, requests in batches:
            for request in requests:
                writer.add(request)
                tokens += len(request.prompt) + len(request.output)
            watch(LoadProgress(bytes_read, len(writer), tokens))
    if not len(writer):
        check_readable(reading, 1)
        reasons = reading.faults.summary
        raise UserError(f"no request with an output in the log{f': {reasons}' if reasons else ''}; it may be {FORMATS}")
    return writer.finish(), writer.facts


def _named(items: Sequence[Item], reading: Reading) -> list[Named]:
    return [
        Named(item.name, prompt, output, item.origin or Origin()) for item, prompt, output in tokenize(items, reading)
    ]
