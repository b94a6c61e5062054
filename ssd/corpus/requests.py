"""The log of requests in the ring: position, request id and time of each, by which requests are forgotten.

Request ids are stored as 64-bit hashes, so that a request costs 26 bytes. This module does not depend on the index.
"""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

NO_NAME = 0

ROW = np.dtype([("first", np.int64), ("name", np.int64), ("time", np.float64), ("tag", np.uint16)])
"""Row of a request: its first position, the hash of its id, when it was appended, in seconds, and its tag. It ends
where the next one begins."""

MIN_ROOM = 1024


WRITTEN_HASH = re.compile(r"#[0-9a-f]{16}")


def hash_of(request_id: str | None) -> int:
    """Return the 64-bit hash of a request id; `NO_NAME` for None; for an id from `id_of_hash`, its hash."""
    if request_id is None:
        return NO_NAME
    if WRITTEN_HASH.fullmatch(request_id):
        return int.from_bytes(bytes.fromhex(request_id[1:]), "big", signed=True) or 1
    digest = hashlib.blake2b(request_id.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


def id_of_hash(hashed: int) -> str:
    """Return a request id with this hash, for text whose own id is not known, as in snapshots."""
    return "#" + hashed.to_bytes(8, "big", signed=True).hex()


class Text(NamedTuple):
    """A finished request that is not in the index yet."""

    tokens: np.ndarray
    """uint32 [N]."""
    name: int
    """Hash of its id."""
    time: float
    """Time at which it was appended, in seconds."""
    tag: int
    """See `ssd.corpus.rollout.Rollout.tag`."""


@dataclass(eq=False)
class Forget:
    """A command to forget the requests with an id, or those appended before a time."""

    name: int = NO_NAME
    before: float = -math.inf
    requests: int = 0
    """Number of requests that the command has removed so far."""

    def covers(self, name: int, time: float) -> bool:
        """Return whether the command applies to a request."""
        return (name == self.name and name != NO_NAME) or time < self.before

    def among(self, rows: np.ndarray) -> np.ndarray:
        """Return a mask of the rows that the command applies to, bool [N]."""
        named = (rows["name"] == self.name) & (rows["name"] != NO_NAME)
        return named | (rows["time"] < self.before)

    def count(self, rows: np.ndarray) -> int:
        """Return the number of requests that the command applies to; pieces of a long one share name and time."""
        names, times = (rows[self.among(rows)][column] for column in ("name", "time"))
        are_pieces = (names[1:] == names[:-1]) & (times[1:] == times[:-1]) & (names[1:] != NO_NAME)
        return len(names) - int(np.count_nonzero(are_pieces))


class RequestLog:
    """The requests in the ring, oldest first. Grows by doubling; one thread at a time may use it."""

    def __init__(self) -> None:
        self._table = np.empty(MIN_ROOM, ROW)
        self._start, self._end = 0, 0

    def __len__(self) -> int:
        return self._end - self._start

    @property
    def rows(self) -> np.ndarray:
        """`ROW` [N]; valid until the next change."""
        return self._table[self._start : self._end]

    def add(self, first: int, name: int, time: float, tag: int = 0) -> None:
        """Add a request that was written from position `first` on, after all others."""
        if self._end == len(self._table):
            self.replace(self.rows)
        self._table[self._end] = (first, name, time, tag)
        self._end += 1

    def replace(self, rows: np.ndarray) -> None:
        """Replace all rows by copies of `rows`."""
        table = np.empty(max(MIN_ROOM, 2 * len(rows)), ROW)
        table[: len(rows)] = rows
        self._table, self._start, self._end = table, 0, len(rows)

    def drop_from(self, position: int) -> None:
        """Drop requests that were written from `position` on."""
        self._end = bisect_left(self._table["first"], position, self._start, self._end)

    def drop_before(self, position: int) -> None:
        """Drop requests whose text ends at `position` or before."""
        # np.searchsorted would first copy the whole column.
        begun = bisect_right(self._table["first"], position, self._start, self._end)
        self._start = max(self._start, begun - 1)

    def spans_of(self, forgets: Sequence[Forget], head: int) -> np.ndarray:
        """Return the first and last + 1 position of each request that any of the commands applies to, int64 [N, 2].

        head: end of the newest request.
        """
        ends = np.append(self.rows["first"], head)[1:]
        return np.stack((self.rows["first"], ends), axis=1)[self._among(forgets)]

    def remove(self, forgets: Sequence[Forget]) -> None:
        """Remove the requests that any of the commands applies to.

        Without its row, a removed request's separators belong to the span of the request before it.
        """
        self.replace(self.rows[~self._among(forgets)])

    def _among(self, forgets: Sequence[Forget]) -> np.ndarray:
        """Return which rows any of the commands applies to, bool [N]."""
        return np.any([forget.among(self.rows) for forget in forgets], axis=0)

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self._table.nbytes
