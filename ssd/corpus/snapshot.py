"""Snapshots: a corpus in one file, with its text, largest suffix array, log of requests and learned tables.

Text of the smaller tiers is saved without positions and sorted again on loading; running requests are not saved.
Tokens are saved from the oldest on, and positions count from there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ssd.config import MAX_MATCH_DEPTH
from ssd.corpus.corpus import Corpus
from ssd.corpus.index import ReplacedError, State
from ssd.corpus.requests import ROW
from ssd.corpus.ring import MAX_CAPACITY, MIN_CAPACITY, SEPARATOR
from ssd.corpus.sections import DamagedError, Section, SnapshotError, read_sections, write_sections
from ssd.kernels.learned import LearnedTables, tables_layout
from ssd.stats import Stats

logger = logging.getLogger(__name__)

CHUNK = 1 << 20
"""Number of array elements that are copied at a time, a few megabytes."""

DEPTH, SIZE, COVERED, TABLES_LAYOUT, CAPACITY = range(5)
"""Entries of the section "facts", int64: maximum match length, tokens of text, how many of them the suffix array
covers, `tables_layout`, and the capacity of the corpus."""

ATTEMPTS, ATTEMPTS_S = 3, 15.0
"""A save begins again if text was forgotten or overwritten while it was written: a number of times at least, and in the
first seconds as often as needed, which is enough for a series of commands to forget."""

MAX_LOGIT = 7.0
MAX_WEIGHT = 1e3
"""Larger values are never learned. Tables from files are checked, since kernels do not check them."""


class Loaded(NamedTuple):
    """Contents of a snapshot."""

    corpus: Corpus
    stats: Stats
    """Counters, all 0 if none were saved."""
    notes: list[str]
    """Contents that could not be used, and why."""


def save(corpus: Corpus, path: str | Path, stats: Stats | None = None, *, max_tokens: int | None = None) -> int:
    """Write all finished requests and learned tables, and the counters if given; return the file's size in bytes.

    max_tokens: number of tokens that are written at most, the newest; None for all.
    Any thread may call it while others draft, append and forget; none of them waits for the disk. It needs a few
    megabytes of memory, and 4 bytes for each token if a merge ends meanwhile, which leaves the old suffix array to it.
    A snapshot with the same path is replaced once the new one is safe on disk, unless text was forgotten meanwhile:
    then the save begins again. Raises SnapshotError if it cannot be written.
    """
    corpus.refresh()
    attempts, began = 0, time.monotonic()
    while True:
        attempts += 1
        forgotten = corpus.erasures
        sections = _sections(corpus, stats, max_tokens)
        try:
            return write_sections(Path(path), sections, lambda: _check_unforgotten(corpus, forgotten))  # noqa: B023
        except ReplacedError:
            if attempts >= ATTEMPTS and time.monotonic() - began > ATTEMPTS_S:
                reason = f"its text was replaced meanwhile, {attempts} times"
                raise SnapshotError(f"{path}: cannot be written: {reason}; try again") from None
        finally:
            sections.close()


def _check_unforgotten(corpus: Corpus, erasures: int) -> None:
    if corpus.erasures != erasures:
        raise ReplacedError


def load(
    path: str | Path,
    capacity: int | None = None,
    depth: int | None = None,
    clock: Callable[[], float] = time.time,
    *,
    may_trim: bool = True,
    max_capacity: int | None = None,
) -> Loaded:
    """Return a corpus with the contents of a snapshot.

    capacity: tokens, or None for that of the saved corpus, but at most `max_capacity`; if it is less than the snapshot
    holds, the newest tokens are loaded. depth: the match depth that is expected, None for any. clock: see `Corpus`.
    may_trim: whether the capacity may be less than the snapshot holds. Raises DamagedError for a file that is proven
    unusable, SnapshotError for one that cannot be read now, is of another version or match depth, or must not be
    trimmed, and ValueError for an impossible capacity, with nothing loaded.
    """
    path = Path(path)
    sections = read_sections(path)
    try:
        facts = _checked_facts(sections)
        rows = _checked_rows(sections, int(facts[SIZE]))
        _check_text(sections, facts)
        tables = _checked_tables(sections, int(facts[TABLES_LAYOUT]))
    except (_UnsoundError, KeyError) as error:
        # The checksums are correct, so the file is not damaged by accident.
        raise DamagedError(f"{path}: was not written by a drafter ({error}); use another snapshot") from None
    if depth is not None and facts[DEPTH] != depth:
        raise SnapshotError(
            f"{path}: its index was made for a match depth of {facts[DEPTH]}, not {depth}; "
            f"set match_depth to {facts[DEPTH]}, or use another snapshot"
        )
    if capacity is None:
        capacity = int(facts[CAPACITY]) if max_capacity is None else min(int(facts[CAPACITY]), max_capacity)
    # A corpus may hold a little more than its capacity.
    held = min(facts[SIZE], facts[CAPACITY])
    if held > capacity and not may_trim:
        raise SnapshotError(
            f"{path}: it has {held:,} tokens, and the capacity is {capacity:,}; set the capacity to at least {held:,}, "
            "or snapshots.trim to keep only the newest tokens"
        )
    corpus = Corpus(capacity, int(facts[DEPTH]), clock)
    corpus.restore(sections["text"], sections["order"], int(facts[COVERED]), rows)
    notes = []
    if held > capacity:
        notes.append(
            f"it has {held:,} tokens, and the capacity is {capacity:,}: only the newest are loaded, and saving "
            "to the same file removes the others"
        )
    if tables is None:
        notes.append("probabilities were learned by another version in other tables; learning starts again")
    else:
        for own, saved in zip(corpus.learned, tables, strict=True):
            own[:] = saved
    stats = _stats(sections, notes)
    for note in notes:
        logger.warning("%s: %s", path, note)
    return Loaded(corpus, stats, notes)


def _sections(corpus: Corpus, stats: Stats | None, max_tokens: int | None) -> Generator[Section, None, None]:
    # Read here: from Python 3.12 on, a generator that was closed before its first section would keep an argument.
    state = corpus.state()
    left_out = 0 if max_tokens is None else max(0, state.head - state.oldest - max_tokens)
    positions = _positions(state, left_out, corpus.depth)
    state = replace(state, oldest=state.oldest + left_out)
    size, covered = state.head - state.oldest, max(0, state.covered - state.oldest)
    yield Section("facts", "<i8", [np.array([corpus.depth, size, covered, tables_layout(), corpus.capacity])])
    yield Section("text", "<u4", _text(state))
    yield Section("order", "<u4", positions)
    rows = _rows(state)
    yield Section("requests.first", "<i8", [rows["first"]])
    yield Section("requests.name", "<i8", [rows["name"]])
    yield Section("requests.time", "<f8", [rows["time"]])
    yield Section("requests.tag", "<u4", [rows["tag"]])
    for name, array in _named(corpus.learned).items():
        yield Section(name, array.dtype.newbyteorder("<").str, [array.ravel()])
    if stats is not None:
        for name, array in stats.counters._asdict().items():
            yield Section(f"stats.{name}", array.dtype.newbyteorder("<").str, [array.ravel()])


def _text(state: State) -> Iterator[np.ndarray]:
    for first in range(state.oldest, state.head, CHUNK):
        yield state.read(first, min(first + CHUNK, state.head))


def _positions(state: State, left_out: int, depth: int) -> Iterator[np.ndarray]:
    """Yield the suffix array of the base tier, without the positions whose keys reach into the oldest `left_out`
    tokens, counted from the first token after these.
    """
    slots, oldest = state.ring.capacity, state.oldest % state.ring.capacity
    for first in range(0, len(state.positions), CHUNK):
        part = state.positions[first : first + CHUNK].astype(np.int64) - oldest
        part[part < 0] += slots
        yield part[part >= left_out + depth] - left_out if left_out else part


def _rows(state: State) -> np.ndarray:
    """Return the requests whose text is saved, counted from the oldest position."""
    rows = state.rows
    begun = int(np.searchsorted(rows["first"], state.oldest, side="right"))
    rows = rows[max(0, begun - 1) :]
    rows["first"] = np.maximum(rows["first"] - state.oldest, 0)
    return rows


def _named(tables: LearnedTables) -> dict[str, np.ndarray]:
    # Files keep the prefix of the first version.
    return {f"odds.{name}": array for name, array in tables._asdict().items()}


class _UnsoundError(Exception):
    """The contents of a section are impossible."""


def _require(condition: bool | np.bool_, otherwise: str) -> None:
    if not condition:
        raise _UnsoundError(otherwise)


def _checked_facts(sections: Mapping[str, np.ndarray]) -> np.ndarray:
    facts = sections["facts"]
    _require(facts.dtype == np.int64 and len(facts) > CAPACITY, "facts are missing")
    _require(0 <= facts[COVERED] <= facts[SIZE], "the suffix array covers more than the text")
    _require(1 <= facts[DEPTH] <= MAX_MATCH_DEPTH, "an impossible match depth")
    _require(MIN_CAPACITY <= facts[CAPACITY] <= MAX_CAPACITY, "an impossible capacity")
    return facts


def _check_text(sections: Mapping[str, np.ndarray], facts: np.ndarray) -> None:
    """Check that the text ends with a request, and that all positions are inside of it."""
    text, order, covered = sections["text"], sections["order"], int(facts[COVERED])
    _require(text.dtype == np.uint32 and order.dtype == np.uint32, "wrong types")
    _require(len(text) == facts[SIZE], "the text has another length")
    _require(len(text) == 0 or text[-1] == SEPARATOR, "the text ends within a request")
    _require(len(order) <= covered, "the suffix array has too many positions")
    for first in range(0, len(order), CHUNK):
        part = order[first : first + CHUNK]
        _require(part.min() >= 1 and part.max() < covered, "a position is outside the text")


def _checked_rows(sections: Mapping[str, np.ndarray], size: int) -> np.ndarray:
    columns = {name: sections[f"requests.{name}"] for name in ("first", "name", "time")}
    rows = np.zeros(len(columns["first"]), ROW)
    for name, column in columns.items():
        _require(len(column) == len(rows) and column.dtype == ROW[name], "requests are incomplete")
        rows[name] = column
    tags = sections["requests.tag"]
    _require(len(tags) == len(rows) and tags.dtype == np.uint32 and not (tags >> 16).any(), "impossible tags")
    rows["tag"] = tags
    first = rows["first"]
    _require(len(rows) == 0 or (first[0] >= 0 and first[-1] < size), "requests lie outside the text")
    _require((np.diff(first) > 0).all(), "requests overlap")
    _require(np.isfinite(rows["time"]).all(), "requests have no time")
    return rows


def _checked_tables(sections: Mapping[str, np.ndarray], layout: int) -> list[np.ndarray] | None:
    """Return the learned tables; None if this version lays them out differently."""
    fresh = _named(LearnedTables.new())
    if layout != tables_layout():
        return None
    for name, own in fresh.items():
        _require(sections[name].size == own.size and sections[name].dtype == own.dtype, "tables of another size")
    cells, logits, *weights = (sections[name].reshape(own.shape) for name, own in fresh.items())
    means, seen = cells.T
    _require(((means >= 0) & (means <= 1)).all(), "probabilities outside 0 to 1")
    _require((np.abs(logits) <= MAX_LOGIT).all() and (seen >= 0).all(), "logits out of range")
    are_sound = all((np.abs(each) <= MAX_WEIGHT).all() for each in weights)
    _require(np.isfinite(seen).all() and are_sound, "weights out of range")
    return [cells, logits, *weights]


def _stats(sections: Mapping[str, np.ndarray], notes: list[str]) -> Stats:
    stats = Stats()
    if "stats.steps" not in sections:
        return stats
    for name, own in stats.counters._asdict().items():
        saved = sections.get(f"stats.{name}")
        if saved is None or saved.size != own.size or saved.dtype != own.dtype:
            notes.append("the counters were written by another version; counting starts again")
            return Stats()
        own[:] = saved.reshape(own.shape)
    return stats
