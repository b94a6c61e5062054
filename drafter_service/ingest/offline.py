"""Learning into a snapshot, without any service running."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import NamedTuple

from drafter_service.ingest.document import Documents
from drafter_service.ingest.sink import Learned
from ssd.config import DrafterConfig
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus
from ssd.corpus.requests import hash_of
from ssd.corpus.sections import read_sections
from ssd.corpus.snapshot import DEPTH, SIZE
from ssd.errors import UserError
from ssd.stats import Stats


class _New(NamedTuple):
    """Documents of a batch that are not in the corpus yet."""

    documents: Documents
    indexes: list[int]
    names: list[int]
    """Their hashes."""
    room: int


class OfflineSink:
    """A corpus that is sorted when it is saved: what would be overwritten by then never costs anything."""

    def __init__(self, path: Path, capacity: int | None = None) -> None:
        """Goes on with the snapshot at `path` if there is one. `capacity`: tokens; None: the default, or more if the
        snapshot holds more.

        Raises UserError for a snapshot that cannot be used or written, or an impossible capacity.
        """
        self._path = path
        if not path.absolute().parent.is_dir():
            raise UserError(f"--snapshot: there is no folder {path.absolute().parent}; make it first")
        try:
            self._corpus, self._stats = _opened(path, capacity)
        except ValueError as problem:
            raise UserError(f"--capacity: {problem}") from None
        self.window = self._corpus.capacity
        self._known = set(self._corpus.request_times())
        self._waiting: deque[_New] = deque()
        self._room = 0
        self._documents = self._tokens = self._duplicates = 0

    @property
    def corpus(self) -> Corpus:
        """What was learned up to the last commit."""
        return self._corpus

    def accept(self, documents: Documents) -> None:
        """Keep documents for the next commit, apart from those that a newer one will overwrite until then."""
        new = self._take_new(documents)
        self._waiting.append(new)
        self._room += new.room
        while self._room - self._waiting[0].room >= self.window:
            old = self._waiting.popleft()
            self._room -= old.room
            self._known.difference_update(old.names)

    def commit(self) -> None:
        """Sort and save. Raises SnapshotError, a UserError, if the disk will not take it."""
        corpus = self._corpus
        for new in self._waiting:
            tokens, offsets, names = new.documents.tokens, new.documents.offsets.tolist(), new.documents.names
            for index in new.indexes:
                corpus.append(tokens[offsets[index] : offsets[index + 1]], names[index])
        self._waiting.clear()
        self._room = 0
        corpus.refresh()
        # Who loads the snapshot sorts what is not merged.
        while corpus.is_merging:
            corpus.refresh()
        self._known = set(corpus.request_times())
        snapshot.save(corpus, self._path, self._stats)

    def finish(self) -> Learned:
        """Commit for the last time."""
        self.commit()
        return Learned(self._documents, self._tokens, self._duplicates)

    def _take_new(self, documents: Documents) -> _New:
        indexes, names = [], []
        for index, name in enumerate(documents.names):
            hashed = hash_of(name)
            if hashed not in self._known:
                self._known.add(hashed)
                indexes.append(index)
                names.append(hashed)
        offsets = documents.offsets
        tokens = int((offsets[1:] - offsets[:-1])[indexes].sum())
        self._documents += len(indexes)
        self._tokens += tokens
        self._duplicates += len(documents) - len(indexes)
        return _New(documents, indexes, names, tokens + len(indexes))


def _opened(path: Path, capacity: int | None) -> tuple[Corpus, Stats]:
    """The corpus of a snapshot, or an empty one. Raises ValueError for an impossible capacity."""
    if not path.exists():
        return Corpus(DrafterConfig.capacity if capacity is None else capacity, DrafterConfig.match_depth), Stats()
    facts = read_sections(path).get("facts")
    if facts is None or len(facts) <= SIZE:
        raise UserError(f"{path}: was not written by a drafter; give another path to --snapshot")
    size, depth = int(facts[SIZE]), int(facts[DEPTH])
    loaded = snapshot.load(path, max(DrafterConfig.capacity, size) if capacity is None else capacity, depth)
    return loaded.corpus, loaded.stats
