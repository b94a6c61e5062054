"""The Draft stream of a client, over gRPC or the step socket: serialized requests out, serialized responses in.

Over the step socket, the thread that waits for drafts reads the socket itself, and a request is written by the thread
that sends it, since waking another thread would take longer. What the connection does not accept at once, such as the
rest of a long request, is written by the thread that runs `pump`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError

from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import DRAFT_METHOD, MAGIC, STATUS, Frames, WireError, framed

READ_BYTES = 1 << 16
"""Maximum number of bytes per read. A buffer of 256 KiB would be mapped anew for each read, which takes 15 us."""
SLICE_BYTES = 1 << 18
"""Maximum number of bytes per write, so that nobody waits long for the lock."""
HUNG_UP = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)


class Stream(Protocol):
    """An open Draft stream.

    Two threads use it: the engine's, which sends requests and waits for drafts, and the client's, which runs `pump`
    until the end. Calls other than `wait` and `pump` are made with a lock held.
    """

    failure: Exception | None = None
    """Reason of the end, None if normal. Valid after `pump` has returned and all responses were received."""

    def send(self, request: bytes) -> None:
        """Send a request, or queue it; never waits."""

    def end(self) -> None:
        """Send the end of the stream after all queued requests."""

    def receive(self) -> list[bytes]:
        """Return the responses that have arrived; never waits."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until there may be a response, or the stream is closed; return False after the timeout."""

    def watch(self) -> None:
        """Make `pump` report outstanding responses, for which no other thread waits, if it does not report all."""
        return

    def pump(self, on_arrival: Callable[[], None]) -> None:
        """Run the stream until its end. Calls `on_arrival` when there may be responses to receive."""

    def cancel(self) -> None:
        """End the stream at once."""

    def close(self) -> None:
        """Release all resources, and end the waits of other threads."""

    def abandon(self) -> None:
        """Release resources in a forked child, where that is safe: gRPC's descriptors remain open."""
        return


class GrpcStream(Stream):
    """A `Stream` over a gRPC channel."""

    def __init__(self, channel: grpc.Channel, metadata: Sequence[tuple[str, str]]) -> None:
        self._channel = channel
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        self._responses: SimpleQueue[bytes] = SimpleQueue()
        self._arrivals: SimpleQueue[None] = SimpleQueue()
        """One element for each response and one for the end, for `wait`."""
        requests: Iterator[bytes] = iter(self._requests.get, None)
        self._call = channel.stream_stream(DRAFT_METHOD)(requests, metadata=metadata)

    def send(self, request: bytes) -> None:
        """Pass a request to gRPC's sending thread."""
        self._requests.put(request)

    def end(self) -> None:
        """End the iterator of gRPC's sending thread."""
        self._requests.put(None)

    def receive(self) -> list[bytes]:
        """Return the responses that `pump` has queued."""
        responses: list[bytes] = []
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


class SocketStream(Stream):
    """A `Stream` over a connected socket."""

    def __init__(self, connection: socket.socket, authorization: str, poll_s: float = 0.0) -> None:
        """Take ownership of the connection, even if this raises OSError. poll_s: see `DrafterClient`."""
        self._socket, self._poll_s = connection, poll_s
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
        self._writing = threading.Lock()
        """Guards the following two."""
        self._unsent = bytearray(MAGIC + framed(authorization.encode()))
        self._is_ending = False
        """Whether to close this half of the connection after `_unsent`."""
        self._is_over = False
        self._has_hung_up = False
        """Whether the other side has hung up, so that no more bytes will arrive."""
        self._is_watched = False
        """Whether `pump` waits for responses as well as for the end."""
        self._closed = threading.Event()
        self._write(b"")  # The authorization, for which the service waits only a while.

    def send(self, request: bytes) -> None:
        """Write what the connection accepts, at most a slice; `pump` writes the rest."""
        self._write(framed(request))

    def end(self) -> None:
        """Close this half of the connection after all queued requests."""
        self._is_ending = True
        self._write(b"")

    def receive(self) -> list[bytes]:
        """Read responses that have arrived: all of them if the other side has hung up, otherwise at least one."""
        responses: list[bytes] = []
        try:
            while not self._is_over and (self._has_hung_up or not responses):
                data = self._socket.recv(READ_BYTES)
                if not data:
                    self._finish(broken())
                for body, is_last in self._frames.feed(data):
                    if is_last:
                        self._finish(_read_end(body))
                        break
                    responses.append(body)
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
        if self._poll_s:
            polled_s = min(timeout_s, self._poll_s)
            if self._poll(polled_s):
                return True
            timeout_s -= polled_s
        # `poll` takes 2 us less than `select`, but counts milliseconds.
        if self._readable.poll(int(timeout_s * 1e3)):
            return True
        try:
            return any(select.select([self._socket], [], [], timeout_s % 1e-3))
        except (ValueError, OSError):  # Too many open files for select, or the stream was closed just now.
            return self._closed.wait(0) or bool(self._readable.poll(1))

    def _poll(self, limit_s: float) -> bool:
        """Wait by polling, at most for a time; see `wait`."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            if self._readable.poll(0):
                return True
        return False

    def watch(self) -> None:
        """Wake `pump`."""
        if not self._is_watched:
            self._is_watched = True
            self._wake_pump()

    def pump(self, on_arrival: Callable[[], None]) -> None:
        """Write what is unsent, and wait for the end and for responses that no other thread waits for."""
        poll = select.poll()
        poll.register(self._wake_receiver, select.POLLIN)
        events = 0
        while not events & HUNG_UP:
            wanted = (select.POLLIN if self._is_watched else 0) | (select.POLLOUT if self._unsent else 0)
            poll.register(self._socket, wanted | HUNG_UP)
            happened = dict(poll.poll())
            if self._wake_receiver.fileno() in happened:
                self._wake_receiver.recv(READ_BYTES)
            events = happened.get(self._socket.fileno(), 0)
            self._has_hung_up = bool(events & HUNG_UP)
            if events & select.POLLOUT:
                self._write(b"")
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

    def _write(self, data: bytes) -> None:
        """Add data to what is unsent, and write as much of that as the connection accepts, at most a slice."""
        with self._writing:
            self._unsent += data
            try:
                if self._unsent:
                    sent = self._socket.send(self._unsent[:SLICE_BYTES])
                    del self._unsent[:sent]
                if self._is_ending and not self._unsent:
                    self._is_ending = False
                    self._socket.shutdown(socket.SHUT_WR)
            except BlockingIOError:
                pass
            except OSError:  # `pump` finds the reason after reading the remaining responses.
                self._unsent.clear()
        if self._unsent:
            self._wake_pump()

    def _wake_pump(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"\0")


def broken(why: object = None) -> StreamError:
    """Return the status of a connection that ended before its stream did."""
    return StreamError(grpc.StatusCode.UNAVAILABLE, "the connection broke" + (f": {why}" if why else ""))


def _read_end(data: bytes) -> StreamError | None:
    """Return the status in the last frame of a stream; None if it ended normally. Raises WireError."""
    try:
        error = pb.Error.FromString(data)
    except DecodeError:
        raise WireError("a frame does not hold an Error") from None
    code = STATUS.get(error.code, grpc.StatusCode.UNKNOWN)
    return None if code is grpc.StatusCode.OK else StreamError(code, error.message)
