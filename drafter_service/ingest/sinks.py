"""Sinks: a namespace of a running service, or a snapshot file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import grpc
import numpy as np

from drafter_service.auth.connector import Connector
from drafter_service.client.protocol import NamespaceState
from drafter_service.ingest.documents import Documents, Totals
from drafter_service.observability.facts import ModelIdentity
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
from drafter_service.transport.wire import MAX_TEXTS, pack
from ssd.config import DrafterConfig
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus
from ssd.corpus.requests import hash_of
from ssd.errors import UserError
from ssd.stats import Stats


class RemoteSink:
    """Learns into a namespace of a running service."""

    def __init__(
        self,
        connector: Connector,
        namespace: str,
        model: ModelIdentity,
        describe: Callable[[grpc.RpcError], str],
    ) -> None:
        """Connect. Raises UserError if the service refuses texts for the namespace.

        describe: returns a message for an error.
        """
        self._namespace = namespace
        self._model = pb.Model(**vars(model))
        self._describe = describe
        self._connector = connector
        self._channel = connector.open()
        self._stub = DrafterServiceStub(self._channel)
        self._total = Totals(0, 0, 0)
        self._answer: grpc.Future | None = self._observe(None)
        self.state = NamespaceState(namespace or f"of {model.name} by default")
        if (answer := self._wait()).namespace:  # Services up to 0.2.0 do not name it.
            self.state = NamespaceState.of(answer)
        """The namespace before anything is learned."""
        self._saved_namespace = answer.namespace or namespace

    def accept(self, documents: Documents) -> None:
        """Send documents, once the service has learned the ones before. Raises UserError if the service fails."""
        for first in range(0, len(documents), MAX_TEXTS):
            self._wait()
            self._answer = self._observe(_texts_of(documents, first, first + MAX_TEXTS))

    def finish(self) -> Totals:
        """Wait until the service has learned and saved everything, and close the connection. Raises UserError."""
        self._wait()
        request = pb.SnapshotRequest(namespace=self._saved_namespace)
        try:
            answer = self._stub.Snapshot(request, metadata=self._connector.metadata())
            self.saved = f"yes, {sum(each.bytes for each in answer.saved) / 1e6:,.1f} MB"
        except grpc.RpcError as error:
            self.saved = (
                f"no, only in the service's memory ({self._describe(error)}). With a --snapshot-folder, the service "
                "saves it at its next interval or when `ssd-drafter snapshot` is run. Without, it is lost when it ends."
            )
        self._channel.close()
        return self._total

    def _observe(self, texts: pb.Texts | None) -> grpc.Future:
        request = pb.ObserveRequest(namespace=self._namespace, model=self._model, texts=texts)
        return self._stub.Observe.future(request, metadata=self._connector.metadata())

    def _wait(self) -> pb.ObserveResponse:
        """Return the response to the last call, an empty one if it was awaited before. Raises UserError."""
        if self._answer is None:
            return pb.ObserveResponse()
        try:
            learned: pb.ObserveResponse = self._answer.result()
        except grpc.RpcError as error:
            self._channel.close()
            reason = self._describe(error)
            was_lost = error.code() is grpc.StatusCode.UNAVAILABLE and self._total.documents
            if was_lost or error.code() is grpc.StatusCode.CANCELLED:
                reason += "; the same command skips what it has saved in its --snapshot-folder"
            raise UserError(reason) from None
        self._answer, total = None, self._total
        self._total = Totals(
            total.documents + learned.texts, total.tokens + learned.tokens, total.duplicates + learned.duplicates
        )
        return learned


def _texts_of(documents: Documents, first: int, end: int) -> pb.Texts:
    """Return documents `first` to `end` - 1, or to the last one, as a message."""
    offsets, times, tags = documents.offsets[first : end + 1], documents.times[first:end], documents.tags[first:end]
    return pb.Texts(
        tokens=pack(documents.tokens[offsets[0] : offsets[-1]], "u4"),
        offsets=pack((offsets - offsets[0]).astype(np.uint32, copy=False), "u4"),
        request_ids=documents.names[first:end],
        times=pack(times, "f8") if np.isfinite(times).any() else b"",
        tags=pack(tags, "u4") if tags.any() else b"",
    )


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
            path.stat()
            is_new = False
        except FileNotFoundError:
            is_new = True
        except OSError as problem:
            # It is not known to be absent, so it must not be replaced.
            raise UserError(f"--snapshot: {path} cannot be read: {problem.strerror}") from None
        try:
            if is_new:
                capacity = DrafterConfig.capacity if capacity is None else capacity
                self._corpus, self._stats = Corpus(capacity, DrafterConfig.match_depth), Stats()
            else:
                self._corpus, self._stats, _ = snapshot.load(path, capacity)
        except ValueError as problem:
            raise UserError(f"--capacity: {problem}") from None
        self._known = set(self._corpus.request_times())
        self._waiting: deque[tuple[np.ndarray, str, float, int]] = deque()
        """Tokens, name, time and tag of each document that is not in the corpus yet."""
        self._room = 0
        """Tokens of the corpus that waiting documents take, each with a separator."""
        self._learned = Totals(0, 0, 0)

    def accept(self, documents: Documents) -> None:
        """Keep documents, without those that newer ones will have overwritten."""
        count, tokens, duplicates = self._learned
        bounds = pairwise(documents.offsets.tolist())
        rows = zip(bounds, documents.names, documents.times.tolist(), documents.tags.tolist(), strict=True)
        for (first, end), name, time, tag in rows:
            if (hashed := hash_of(name)) in self._known:
                duplicates += 1
                continue
            self._known.add(hashed)
            self._waiting.append((documents.tokens[first:end], name, time, tag))
            self._room += end - first + 1
            count, tokens = count + 1, tokens + end - first
        self._learned = Totals(count, tokens, duplicates)
        while self._waiting and self._room - len(self._waiting[0][0]) - 1 >= self._corpus.capacity:
            tokens_of_old, name, *_ = self._waiting.popleft()
            self._room -= len(tokens_of_old) + 1
            self._known.remove(hash_of(name))

    def finish(self) -> Totals:
        """Sort and save. Raises SnapshotError, a UserError, if it cannot be written."""
        corpus, now = self._corpus, self._corpus.clock()
        for tokens, name, time, tag in self._waiting:
            corpus.append(tokens, name, tag, time=time if time < now else None)
        corpus.refresh()
        # Text that is not merged would have to be sorted when the snapshot is loaded.
        while corpus.is_merging:
            corpus.refresh()
        self.saved = f"yes, {snapshot.save(corpus, self._path, self._stats) / 1e6:,.1f} MB"
        return self._learned
