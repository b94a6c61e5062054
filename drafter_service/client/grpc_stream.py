"""The stream of gRPC, which has threads of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue

import grpc

from drafter_service.client.outgoing import Outgoing
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs import drafter_pb2_grpc


class GrpcStream:
    """A `Stream` over a channel."""

    def __init__(self, channel: grpc.Channel, metadata: Sequence[tuple[str, str]]) -> None:
        self.failure: grpc.RpcError | None = None
        """See `Stream.failure`."""
        self._channel = channel
        self._messages: SimpleQueue[Outgoing | None] = SimpleQueue()
        self._responses: SimpleQueue[pb.DraftResponse] = SimpleQueue()
        self._news: SimpleQueue[None] = SimpleQueue()
        """For each response, and for the end: to wait for."""
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        self._call = stub.Draft(self._requests(), metadata=metadata)

    def send(self, messages: Sequence[Outgoing]) -> None:
        """Hand over to the thread that sends."""
        for message in messages:
            self._messages.put(message)

    def end(self) -> None:
        """Let the thread that sends end."""
        self._messages.put(None)

    def receive(self) -> list[pb.DraftResponse]:
        """What `pump` has put by."""
        responses: list[pb.DraftResponse] = []
        with contextlib.suppress(Empty):
            while True:
                responses.append(self._responses.get_nowait())
        return responses

    def wait(self, timeout_s: float) -> bool:
        """Wait for `pump`."""
        with contextlib.suppress(Empty):
            self._news.get(timeout=max(0.0, timeout_s))
            return True
        return False

    def watch(self) -> None:
        """Nothing to do: `pump` always calls."""

    def pump(self, on_arrival: Callable[[], None]) -> None:
        """Take responses from gRPC."""
        try:
            for response in self._call:
                self._responses.put(response)
                self._news.put(None)
                on_arrival()
        except grpc.RpcError as failure:
            self.failure = failure
        finally:
            self._messages.put(None)

    def cancel(self) -> None:
        """Cancel the call."""
        self._call.cancel()

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()
        self._news.put(None)

    def abandon(self) -> None:
        """gRPC's descriptors stay: in a fork none of its calls is safe."""

    def _requests(self) -> Iterator[pb.DraftRequest]:
        for message in iter(self._messages.get, None):
            yield message.message()
