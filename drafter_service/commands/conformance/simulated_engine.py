"""The engine's side of Draft streams, without a client: any bytes, sent at any time, over each transport."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np

from drafter_service.client.streams import StreamError
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import DRAFT_METHOD, HEADER, MAGIC, STATUS, framed, pack, read_header

TIMEOUT_S = 30.0
"""Maximum wait for a response."""

Call = Callable[[Iterator[bytes]], Any]
"""Opens a stream for an iterator of requests; returns an iterator of responses with a method `cancel`."""


def grpc_call(channel: grpc.Channel, metadata: Iterable[tuple[str, str]], **options: Any) -> Call:
    """Return the function that opens streams over gRPC; options: those of gRPC's calls."""
    method = channel.stream_stream(DRAFT_METHOD, response_deserializer=pb.DraftResponse.FromString)
    return lambda requests: method(requests, metadata=tuple(metadata), timeout=TIMEOUT_S, **options)


class SocketCall:
    """A stream over the step socket, an iterator of responses like a call of gRPC."""

    def __init__(self, connection: socket.socket, authorization: str, requests: Iterator[bytes]) -> None:
        """Send the requests in a thread, so that the caller need not read responses meanwhile."""
        connection.settimeout(TIMEOUT_S)
        self.socket = connection
        self._reader = connection.makefile("rb")
        threading.Thread(target=self._send, args=(authorization, requests), daemon=True).start()

    def __iter__(self) -> SocketCall:
        return self

    def __next__(self) -> pb.DraftResponse:
        """Return the next response. Raises StreamError unless the stream ends normally."""
        size, is_last = read_header(self._read(HEADER.size))
        body = self._read(size)
        if not is_last:
            return pb.DraftResponse.FromString(body)
        error = pb.Error.FromString(body)
        if error.code == grpc.StatusCode.OK.value[0]:
            raise StopIteration
        raise StreamError(STATUS.get(error.code, grpc.StatusCode.UNKNOWN), error.message)

    def cancel(self) -> None:
        """Close the connection."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self._reader.close()
        self.socket.close()

    def _send(self, authorization: str, requests: Iterator[bytes]) -> None:
        with suppress(OSError):  # The service has ended the stream; the last frame has the reason.
            self.socket.sendall(MAGIC)
            for data in itertools.chain([authorization.encode()], requests):
                self.socket.sendall(framed(data))
            self.socket.shutdown(socket.SHUT_WR)

    def _read(self, size: int) -> bytes:
        data = b""
        with suppress(OSError, ValueError):
            data = self._reader.read(size)
        if len(data) < size:
            raise StreamError(grpc.StatusCode.UNAVAILABLE, "the connection broke, or nothing was answered")
        return data


class RawStream:
    """A stream that sends any bytes."""

    def __init__(self, open_call: Call) -> None:
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        self.call = open_call(iter(self._requests.get, None))

    def send(self, data: bytes) -> None:
        """Send a request; never waits."""
        self._requests.put(data)

    def receive(self) -> pb.DraftResponse:
        """Wait for the next response, and return it. Raises grpc.RpcError at the end of the stream."""
        response: pb.DraftResponse | None = next(self.call, None)
        if response is None:
            raise StreamError(grpc.StatusCode.OK, "")
        return response

    def end(self) -> None:
        """Send the end of the requests."""
        self._requests.put(None)

    def close(self) -> None:
        """Break the stream."""
        self.end()
        self.call.cancel()


def start(sequence_id: int, prompt: Iterable[int], learn: bool = True, **fields: Any) -> pb.Start:
    """Return the start of a sequence; fields: the others of the message."""
    return pb.Start(sequence_id=sequence_id, prompt=packed(prompt), learn=learn, **fields)


def finish(sequence_id: int, tokens: Iterable[int] = (), learn: bool = True, **fields: Any) -> pb.Finish:
    """Return the finish of a sequence; fields: the others of the message."""
    return pb.Finish(sequence_id=sequence_id, tokens=packed(tokens), learn=learn, **fields)


def packed(tokens: Iterable[int]) -> bytes:
    """Return tokens as messages have them."""
    return pack(np.fromiter(tokens, np.uint32), "u4")
