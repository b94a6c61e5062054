"""Learning into a running service, over one stream."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import grpc
import numpy as np

from drafter_service.auth.connector import Connector
from drafter_service.ingest.document import Documents
from drafter_service.ingest.sink import Learned
from drafter_service.observability.facts import ModelIdentity
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
from drafter_service.transport.wire import MAX_MESSAGE_BYTES, pack
from ssd.errors import UserError

MOST_UNANSWERED = 4
"""Requests on their way: enough to keep the service busy, and a few megabytes."""
NAMES_KNOWN = 100_000
"""Of how many documents a service knows the names at least; the shortest has a token and a separator."""


class RemoteSink:
    """A namespace of a service."""

    window = 2 * NAMES_KNOWN

    def __init__(
        self, connector: Connector, namespace: str, model: ModelIdentity, told: Callable[[grpc.RpcError], str]
    ) -> None:
        """`told` says for people what went wrong. Raises UserError if the service cannot be reached or refuses."""
        self._told = told
        sizes = [(f"grpc.max_{way}_message_length", MAX_MESSAGE_BYTES) for way in ("send", "receive")]
        self._channel = connector.open(sizes)
        self._requests: queue.SimpleQueue[pb.WarmRequest | None] = queue.SimpleQueue()
        self._sent = self._answered = 0
        self._problem: str | None = None
        self._changed = threading.Condition()
        self._total = Learned(0, 0, 0)
        stream = DrafterServiceStub(self._channel).Warm(iter(self._requests.get, None), metadata=connector.metadata())
        self._reader = threading.Thread(target=self._read, args=(stream,), name="ssd-warm", daemon=True)
        self._reader.start()
        described = pb.Model(**vars(model))
        self._send(pb.WarmRequest(namespace=namespace, model=described))
        self.commit()

    def accept(self, documents: Documents) -> None:
        """Send documents; blocks while the service is busy. Raises UserError if the service fails."""
        with self._changed:
            self._changed.wait_for(lambda: self._sent - self._answered < MOST_UNANSWERED or self._problem)
        texts = pb.Texts(
            tokens=pack(documents.tokens, "u4"),
            offsets=pack(documents.offsets.astype(np.uint32, copy=False), "u4"),
            requests=documents.names,
        )
        self._send(pb.WarmRequest(texts=texts))

    def commit(self) -> None:
        """Returns once the service has taken all that was sent. Raises UserError if it fails."""
        with self._changed:
            self._changed.wait_for(lambda: self._sent == self._answered or self._problem)
        self._check()

    def finish(self) -> Learned:
        """Commit for the last time and hang up."""
        self.commit()
        self._requests.put(None)
        self._reader.join()
        self._channel.close()
        return self._total

    def _send(self, request: pb.WarmRequest) -> None:
        self._check()
        self._sent += 1
        self._requests.put(request)

    def _check(self) -> None:
        if self._problem is not None:
            self._channel.close()
            raise UserError(self._problem)

    def _read(self, stream: Iterator[pb.WarmResponse]) -> None:
        try:
            for response in stream:
                with self._changed:
                    self._answered += 1
                    self._total = Learned(response.texts, response.tokens, response.duplicates)
                    self._changed.notify_all()
        except grpc.RpcError as error:
            with self._changed:
                self._problem = self._told(error)
                self._changed.notify_all()
