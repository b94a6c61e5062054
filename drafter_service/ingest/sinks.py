"""Sinks: a namespace of a running service, or a snapshot file."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np

from drafter_service.auth.connector import Connector
from drafter_service.ingest.documents import Documents, Totals
from drafter_service.observability.facts import ModelIdentity
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
from drafter_service.transport.wire import pack
from ssd.config import DrafterConfig
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus
from ssd.corpus.requests import hash_of
from ssd.errors import UserError
from ssd.stats import Stats

MAX_UNANSWERED = 4
"""Requests in flight: enough to keep the service busy, and a few megabytes."""


class RemoteSink:
    """Learns into a namespace of a running service, over one stream."""

    def __init__(
        self,
        connector: Connector,
        namespace: str,
        model: ModelIdentity,
        describe: Callable[[grpc.RpcError], str],
        *,
        shadow: bool = False,
    ) -> None:
        """Open the stream. Raises UserError if the service refuses it.

        describe: returns a message for an error. shadow: whether documents contain whole prompts, and are scored before
        they are learned.
        """
        self._shadow = shadow
        self._describe = describe
        self._channel = connector.open()
        self._requests: queue.SimpleQueue[pb.WarmRequest | None] = queue.SimpleQueue()
        self._sent = self._answered = 0
        self._problem: str | None = None
        self._changed = threading.Condition()
        self._total = Totals(0, 0, 0)
        stream = DrafterServiceStub(self._channel).Warm(iter(self._requests.get, None), metadata=connector.metadata())
        self._reader = threading.Thread(target=self._read, args=(stream,), name="ssd-warm", daemon=True)
        self._reader.start()
        self._send(pb.WarmRequest(namespace=namespace, model=pb.Model(**vars(model))))
        self._wait_for_answers()

    def accept(self, documents: Documents) -> None:
        """Send documents. Blocks while the service is busy. Raises UserError if the service fails."""
        with self._changed:
            self._changed.wait_for(lambda: self._sent - self._answered < MAX_UNANSWERED or self._problem)
        texts = pb.Texts(
            tokens=pack(documents.tokens, "u4"),
            offsets=pack(documents.offsets.astype(np.uint32, copy=False), "u4"),
            request_ids=documents.names,
            prompt_lengths=pack(documents.prompt_lengths, "u4") if self._shadow else b"",
        )
        self._send(pb.WarmRequest(texts=texts))

    def finish(self) -> Totals:
        """Wait until the service has learned everything sent, and close the connection. Raises UserError."""
        self._wait_for_answers()
        self._requests.put(None)
        self._reader.join()
        self._channel.close()
        return self._total

    def _send(self, request: pb.WarmRequest) -> None:
        self._check()
        self._sent += 1
        self._requests.put(request)

    def _wait_for_answers(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._sent == self._answered or self._problem)
        self._check()

    def _check(self) -> None:
        if self._problem is not None:
            self._channel.close()
            raise UserError(self._problem)

    def _read(self, stream: Iterator[pb.WarmResponse]) -> None:
        try:
            for response in stream:
                with self._changed:
                    self._answered += 1
                    self._total = Totals(response.texts, response.tokens, response.duplicates)
                    self._changed.notify_all()
        except grpc.RpcError as error:
            with self._changed:
                self._problem = self._describe(error)
                self._changed.notify_all()


class _New(NamedTuple):
    """Documents of a batch that are not in the corpus yet."""

    documents: Documents
    indexes: list[int]
    names: list[int]
    """Hashes of their names."""
    room: int


class OfflineSink:
    """Learns into a snapshot file. The corpus is sorted only when it is saved, so overwritten text is never sorted."""

    def __init__(self, path: Path, capacity: int | None = None) -> None:
        """Continue the snapshot at `path` if there is one.

        capacity: tokens; None: that of the snapshot, or the default for a new one. Raises UserError for a snapshot that
        cannot be read or written, or a capacity out of range.
        """
        self._path = path
        if not path.absolute().parent.is_dir():
            raise UserError(f"--snapshot: there is no folder {path.absolute().parent}; create it first")
        try:
            if path.exists():
                self._corpus, self._stats, _ = snapshot.load(path, capacity)
            else:
                capacity = DrafterConfig.capacity if capacity is None else capacity
                self._corpus, self._stats = Corpus(capacity, DrafterConfig.match_depth), Stats()
        except ValueError as problem:
            raise UserError(f"--capacity: {problem}") from None
        self._known = set(self._corpus.request_times())
        self._waiting: deque[_New] = deque()
        self._room = 0
        self._documents = self._tokens = self._duplicates = 0

    def accept(self, documents: Documents) -> None:
        """Keep documents, without those that newer ones will have overwritten."""
        new = self._take_new(documents)
        self._waiting.append(new)
        self._room += new.room
        while self._room - self._waiting[0].room >= self._corpus.capacity:
            old = self._waiting.popleft()
            self._room -= old.room
            self._known.difference_update(old.names)

    def finish(self) -> Totals:
        """Sort and save. Raises SnapshotError, a UserError, if it cannot be written."""
        corpus = self._corpus
        for new in self._waiting:
            tokens, offsets, names = new.documents.tokens, new.documents.offsets.tolist(), new.documents.names
            for index in new.indexes:
                corpus.append(tokens[offsets[index] : offsets[index + 1]], names[index])
        corpus.refresh()
        # Text that is not merged would have to be sorted when the snapshot is loaded.
        while corpus.is_merging:
            corpus.refresh()
        snapshot.save(corpus, self._path, self._stats)
        return Totals(self._documents, self._tokens, self._duplicates)

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
