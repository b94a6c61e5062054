"""Read the requests of a log into a `Recording`, in bounded memory: tokens go to a file that is mapped into memory."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from drafter_service.ingest.documents import Faults, Item, Origin
from drafter_service.ingest.files import File
from drafter_service.ingest.pipeline import check_readable, read_all
from drafter_service.ingest.reading import Reading, tokenize
from ssd.errors import UserError
from ssd.replay import Recording

FORMATS = (
    'JSON lines of requests with their responses ({"request": {"messages": [...]}, "response": {"choices": [...]}}), '
    'of prompts and outputs ({"prompt": "...", "completion": "..."}), '
    'or of token ids ({"prompt_token_ids": [...], "output_token_ids": [...]})'
)
"""Formats that a user with an unreadable log is advised to write."""


@dataclass
class LogFacts:
    """Contents of a log, and anything unusual about it."""

    files: Counter[str] = field(default_factory=Counter)
    """Number of files by format."""
    faults: Faults = field(default_factory=Faults)
    backwards: int = 0
    """Requests that are earlier than the one before them in the log."""
    repeated_names: int = 0
    """Requests with the id and the text of an earlier one."""
    note: str | None = None
    """`Reading.note`."""


def read_requests(
    files: Sequence[File], reading: Reading, file: BinaryIO, watch: Callable[[int, int], None]
) -> tuple[Recording, LogFacts]:
    """Read the requests of all files. `watch` is called as in `load`.

    file: an empty file to write tokens to, which must be open while the recording is in use. Raises UserError if there
    are no requests.
    """
    facts = LogFacts(reading.kinds, reading.faults)
    # Two numbers per request each: tokens of prompt and output, times of both ends, numbers of user and session.
    lengths, times, owners = array("q"), array("d"), array("q")
    users, sessions, names, tokens = dict[str, int](), dict[str, int](), set[int](), 0
    with closing(read_all(files, reading, _texts)) as batches:
        for bytes_read, requests in batches:
            for name, prompt, output, (began, ended, user, session) in requests:
                file.write(prompt.tobytes() + output.tobytes())
                facts.backwards += bool(times) and began is not None and began < times[-2]
                facts.repeated_names += hash(name) in names
                names.add(hash(name))
                lengths.extend((len(prompt), len(output)))
                tokens += len(prompt) + len(output)
                times.extend((math.nan if began is None else began, math.nan if ended is None else ended))
                owners.extend((_number(users, user), _number(sessions, session)))
            watch(bytes_read, tokens)
    if not lengths:
        check_readable(reading, 1)
        reasons = reading.faults.summary
        raise UserError(f"no request with an output in the log{f': {reasons}' if reasons else ''}; it may be {FORMATS}")
    facts.note = reading.note
    file.flush()
    text = np.memmap(file, np.uint32, "r") if tokens else np.empty(0, np.uint32)
    (prompts, outputs), (user_of, session_of) = (np.array(each).reshape(-1, 2).T for each in (lengths, owners))
    began_s, ended_s = np.array(times).reshape(-1, 2).T
    recording = Recording.from_arrays(
        text, prompts, outputs, began_s=began_s, ended_s=ended_s, users=user_of, sessions=session_of
    )
    return recording, facts


def _number(numbers: dict[str, int], name: str | None) -> int:
    return -1 if name is None else numbers.setdefault(name, len(numbers))


def _texts(items: Sequence[Item], reading: Reading) -> list[tuple[str, np.ndarray, np.ndarray, Origin]]:
    """Return name, prompt, output and origin of requests, as token ids."""
    return [(item.name, prompt, output, item.origin or Origin()) for item, prompt, output in tokenize(items, reading)]
