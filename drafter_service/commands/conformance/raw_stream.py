"""A Draft stream that sends any bytes, and waits for each response."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Protocol

import grpc

from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import DRAFT_METHOD, HEADER, MAGIC, STATUS, framed, read_header

TIMEOUT_S = 20.0
"""Maximum wait for a response."""


class StreamEndedError(Exception):
    """The service has ended the stream."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(f"the stream ended with {code.name}: {message}")
        self.code = code
        self.message = message


class RawStream(Protocol):
    """An open stream."""

    def send(self, data: bytes) -> None:
        """Send a request."""

    def receive(self) -> pb.DraftResponse:
        """Return the next response. Raises StreamEndedError, with the code OK after a normal end."""

    def end(self) -> None:
        """Send the end of the requests."""

    def close(self) -> None:
        """Release the connection."""


class RawGrpcStream:
    """A stream over a gRPC channel."""

    def __init__(self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...]) -> None:
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        method = channel.stream_stream(DRAFT_METHOD, response_deserializer=pb.DraftResponse.FromString)
        self._call = method(self._sent(), metadata=metadata, timeout=TIMEOUT_S)

    def send(self, data: bytes) -> None:
        """Queue a request for gRPC's thread."""
        self._requests.put(data)

    def receive(self) -> pb.DraftResponse:
        """Wait for gRPC's next response."""
        try:
            response: pb.DraftResponse = next(self._call)
        except StopIteration:
            raise StreamEndedError(grpc.StatusCode.OK, "") from None
        except grpc.RpcError as failure:
            raise StreamEndedError(failure.code(), str(failure.details())) from None
        return response

    def end(self) -> None:
        """End gRPC's iterator."""
        self._requests.put(None)

    def close(self) -> None:
        """Cancel the call."""
        self._requests.put(None)
        self._call.cancel()

    def _sent(self) -> Iterator[bytes]:
        return iter(self._requests.get, None)


class RawSocketStream:
    """A stream over a step socket."""

    def __init__(self, connection: socket.socket, authorization: str) -> None:
        self._socket = connection
        connection.settimeout(TIMEOUT_S)
        connection.sendall(MAGIC + framed(authorization.encode()))

    def send(self, data: bytes) -> None:
        """Write a frame."""
        with contextlib.suppress(OSError):  # The reason is in the last frame, which `receive` reads.
            self._socket.sendall(framed(data))

    def receive(self) -> pb.DraftResponse:
        """Read a frame."""
        size, is_last = read_header(self._read(HEADER.size))
        data = self._read(size)
        if is_last:
            error = pb.Error.FromString(data)
            raise StreamEndedError(STATUS.get(error.code, grpc.StatusCode.UNKNOWN), error.message)
        return pb.DraftResponse.FromString(data)

    def end(self) -> None:
        """Close this half of the connection."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                more = self._socket.recv(size - len(data))
            except OSError as problem:
                raise StreamEndedError(grpc.StatusCode.UNAVAILABLE, str(problem)) from None
            if not more:
                raise StreamEndedError(grpc.StatusCode.UNAVAILABLE, "the connection closed without a last frame")
            data += more
        return data
