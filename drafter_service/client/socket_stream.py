"""The stream over the step socket. The thread that waits for drafts reads the socket itself.

A small request is written by the thread that sends it, since waking another thread would take longer. Long requests,
and requests queued after them, are serialized by the thread that runs `pump`, and written a slice at a time.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from drafter_service.client.messages import OutgoingRequest
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.frames import MAGIC, Frames, framed
from drafter_service.transport.wire import WireError

READ_BYTES = 1 << 16
"""Maximum number of bytes per read. A buffer of 256 KiB would be mapped anew for each read, which takes 15 us."""
SMALL_BYTES = 16 << 10
"""Maximum text of a small request; copying it takes about 10 us."""
SLICE_BYTES = 1 << 18
NOTHING = memoryview(b"")
HUNG_UP = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)
STATUS = {code.value[0]: code for code in grpc.StatusCode}

Parsed = TypeVar("Parsed", bound=Message)


class StreamError(grpc.RpcError):  # type: ignore[misc]
    """The status of a stream that did not end normally, as gRPC would report it."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        """Return the gRPC status code."""
        return self._code

    def details(self) -> str:
        """Return the reason."""
        return self._details


class SocketStream:
    """A `Stream` over a connected socket."""

    def __init__(self, connection: socket.socket, authorization: str) -> None:
        """Take ownership of the connection, even if this raises OSError."""
        self.failure: StreamError | WireError | None = None
        """See `Stream.failure`."""
        self._socket = connection
        try:
            connection.setblocking(False)
            self._wake_sender, self._wake_receiver = socket.socketpair()
        except OSError:
            connection.close()
            raise
        self._wake_sender.setblocking(False)
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._frames = Frames()
        self._writer = SocketWriter(connection, MAGIC + framed(authorization.encode()), self._wake_pump)
        self._is_over = False
        self._has_hung_up = False
        """Whether the other side has hung up, so that no more bytes will arrive."""
        self._is_watched = False
        """Whether `pump` waits for responses as well as for the end."""
        self._closed = threading.Event()

    def send(self, requests: Sequence[OutgoingRequest]) -> None:
        """Write small requests; queue long ones, and those after them, for `pump`."""
        for request in requests:
            self._writer.send(request)

    def end(self) -> None:
        """Close this half of the connection after all queued requests."""
        self._writer.end()

    def receive(self) -> list[pb.DraftResponse]:
        """Read responses that have arrived: all of them if the other side has hung up, otherwise at least one."""
        responses: list[pb.DraftResponse] = []
        try:
            while not self._is_over and (self._has_hung_up or not responses):
                data = self._socket.recv(READ_BYTES)
                if not data:
                    self._finish(broken())
                for body, is_last in self._frames.feed(data):
                    if is_last:
                        self._finish(_read_end(body))
                        break
                    responses.append(_parse(pb.DraftResponse, body))
        except BlockingIOError:
            pass
        except OSError as problem:
            self._finish(broken(problem))
        except WireError as problem:
            self._finish(problem)
        return responses

    def wait(self, timeout_s: float) -> bool:
        """Wait for the socket itself."""
        timeout_s = max(0.0, timeout_s)
        if self._is_over:
            return self._closed.wait(timeout_s)
        # `poll` takes 2 us less than `select`, but counts milliseconds.
        if self._readable.poll(int(timeout_s * 1e3)):
            return True
        try:
            return any(select.select([self._socket], [], [], timeout_s % 1e-3))
        except (ValueError, OSError):  # Too many open files for select, or the stream was closed just now.
            return self._closed.wait(0) or bool(self._readable.poll(1))

    def watch(self) -> None:
        """Wake `pump`."""
        if not self._is_watched:
            self._is_watched = True
            self._wake_pump()

    def pump(self, on_arrival: Callable[[], None]) -> None:
        """Write long requests, and wait for the end and for responses that no other thread waits for."""
        poll = select.poll()
        poll.register(self._wake_receiver, select.POLLIN)
        events = 0
        while not events & HUNG_UP:
            wanted = (select.POLLIN if self._is_watched else 0) | (select.POLLOUT if self._writer.has_more else 0)
            poll.register(self._socket, wanted | HUNG_UP)
            happened = dict(poll.poll())
            if self._wake_receiver.fileno() in happened:
                self._wake_receiver.recv(READ_BYTES)
            events = happened.get(self._socket.fileno(), 0)
            self._has_hung_up = bool(events & HUNG_UP)
            if events & select.POLLOUT:
                self._writer.write_some()
            if events & ~select.POLLOUT:
                self._is_watched = False
                on_arrival()

    def cancel(self) -> None:
        """Shut the connection down."""
        self._finish(broken("by this side"))

    def close(self) -> None:
        """Close the socket."""
        self._is_over = True
        self._closed.set()  # Before closing the socket, which waiting threads would consider broken.
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors."""
        for each in (self._socket, self._wake_sender, self._wake_receiver):
            each.close()

    def _finish(self, failure: StreamError | WireError | None) -> None:
        """Record the end; `pump` notices it by the shutdown."""
        if not self._is_over:
            self._is_over, self.failure = True, failure
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _wake_pump(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"\0")


class SocketWriter:
    """Writes requests to a non-blocking connection, in order. Only one thread at a time may call `send` and `end`."""

    def __init__(self, connection: socket.socket, first: bytes, wake: Callable[[], None]) -> None:
        """`first` is written before all requests. `wake` makes another thread call `write_some` while it `has_more`."""
        self._socket = connection
        self._wake = wake
        self._writing = threading.Lock()
        self._data = memoryview(first)
        """Unwritten bytes of the current frame."""
        self._queue: deque[OutgoingRequest] = deque()
        self._is_ending = False
        """Whether to close this half of the connection after the queue."""
        self._is_over = False

    @property
    def has_more(self) -> bool:
        """Whether there is something to write."""
        return not self._is_over and bool(self._data or self._queue or self._is_ending)

    def send(self, request: OutgoingRequest) -> None:
        """Write a small request if the queue is empty, otherwise queue it; never waits."""
        if not (request.text_bytes <= SMALL_BYTES and self._write_now(request)):
            self._queue.append(request)
        if self.has_more:
            self._wake()

    def end(self) -> None:
        """Close this half of the connection after all queued requests."""
        self._is_ending = True
        self._wake()

    def write_some(self) -> None:
        """Write as much as the connection accepts, at most a slice."""
        with self._writing:
            if not self._data and self._queue:
                self._data = _frame_of(self._queue.popleft())
            self._write()

    def _write_now(self, request: OutgoingRequest) -> bool:
        """Write a request, or as much as the connection accepts, if the queue is empty; return whether it was."""
        if not self._writing.acquire(blocking=False):
            return False
        try:
            if self._data or self._queue or self._is_over:
                return self._is_over
            self._data = _frame_of(request)
            self._write()
            return True
        finally:
            self._writing.release()

    def _write(self) -> None:
        try:
            if self._data:
                # An empty view would keep the whole frame in memory.
                self._data = self._data[self._socket.send(self._data[:SLICE_BYTES]) :] or NOTHING
            elif self._is_ending and not self._queue:
                self._is_over = True
                self._socket.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:  # `pump` finds the reason after reading the remaining responses.
            self._is_over = True
            self._data = NOTHING
            self._queue.clear()


def broken(why: object = None) -> StreamError:
    """Return the status of a connection that ended before its stream did."""
    return StreamError(grpc.StatusCode.UNAVAILABLE, "the connection broke" + (f": {why}" if why else ""))


def _read_end(data: bytes) -> StreamError | None:
    """Return the status in the last frame of a stream; None if it ended normally. Raises WireError."""
    error = _parse(pb.Error, data)
    code = STATUS.get(error.code, grpc.StatusCode.UNKNOWN)
    return None if code is grpc.StatusCode.OK else StreamError(code, error.message)


def _parse(kind: type[Parsed], data: bytes) -> Parsed:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise WireError(f"a frame does not hold a {kind.__name__}") from None


def _frame_of(request: OutgoingRequest) -> memoryview:
    return memoryview(framed(request.message().SerializeToString()))
