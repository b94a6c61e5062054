"""The interface of a Draft stream, and the stream over gRPC, which has its own threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

import grpc

from drafter_service.client.messages import OutgoingRequest
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs import drafter_pb2_grpc


class Stream(Protocol):
    """An open Draft stream.

    Two threads use it: the engine's, which sends requests and waits for drafts, and the client's, which runs `pump`
    until the end. Calls other than `wait` and `pump` are made with a lock held.
    """

    @property
    def failure(self) -> Exception | None:
        """Reason of the end, None if normal. Valid after `pump` has returned and all responses were received."""

    def send(self, requests: Sequence[OutgoingRequest]) -> None:
        """Queue requests for sending; never waits."""

    def end(self) -> None:
        """Send the end of the stream after all queued requests."""

    def receive(self) -> list[pb.DraftResponse]:
        """Return the responses that have arrived; never waits."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until there may be a response, or the stream is closed; return False after the timeout."""

    def watch(self) -> None:
        """Make `pump` report outstanding responses, for which no other thread waits."""

    def pump(self, on_arrival: Callable[[], None]) -> None:
        """Run the stream until its end. Calls `on_arrival` when there may be responses to receive."""

    def cancel(self) -> None:
        """End the stream at once."""

    def close(self) -> None:
        """Release all resources, and end the waits of other threads."""

    def abandon(self) -> None:
        """Release resources in a forked child, as far as this does not affect the parent's stream."""


class GrpcStream:
    """A `Stream` over a gRPC channel."""

    def __init__(self, channel: grpc.Channel, metadata: Sequence[tuple[str, str]]) -> None:
        self.failure: grpc.RpcError | None = None
        """See `Stream.failure`."""
        self._channel = channel
        self._requests: SimpleQueue[OutgoingRequest | None] = SimpleQueue()
        self._responses: SimpleQueue[pb.DraftResponse] = SimpleQueue()
        self._arrivals: SimpleQueue[None] = SimpleQueue()
        """One element for each response and one for the end, for `wait`."""
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        self._call = stub.Draft(self._messages(), metadata=metadata)

    def send(self, requests: Sequence[OutgoingRequest]) -> None:
        """Pass requests to gRPC's sending thread."""
        for request in requests:
            self._requests.put(request)

    def end(self) -> None:
        """End the iterator of gRPC's sending thread."""
        self._requests.put(None)

    def receive(self) -> list[pb.DraftResponse]:
        """Return the responses that `pump` has queued."""
        responses: list[pb.DraftResponse] = []
        with contextlib.suppress(Empty):
            while True:
                responses.append(self._responses.get_nowait())
        return responses

    def wait(self, timeout_s: float) -> bool:
        """Wait for `pump`."""
        with contextlib.suppress(Empty):
            self._arrivals.get(timeout=max(0.0, timeout_s))
            return True
        return False

    def watch(self) -> None:
        """Do nothing: `pump` reports every response."""

    def pump(self, on_arrival: Callable[[], None]) -> None:
        """Queue the responses that gRPC yields."""
        try:
            for response in self._call:
                self._responses.put(response)
                self._arrivals.put(None)
                on_arrival()
        except grpc.RpcError as failure:
            self.failure = failure
        finally:
            self._requests.put(None)

    def cancel(self) -> None:
        """Cancel the call."""
        self._call.cancel()

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()
        self._arrivals.put(None)

    def abandon(self) -> None:
        """Do nothing: gRPC's calls are not safe in a forked child, so its descriptors remain open."""

    def _messages(self) -> Iterator[pb.DraftRequest]:
        for request in iter(self._requests.get, None):
            yield request.message()
