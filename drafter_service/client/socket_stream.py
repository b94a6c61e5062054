"""The stream over the step socket: the thread that waits for drafts reads them itself."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Sequence

from drafter_service.client.outgoing import Outgoing
from drafter_service.client.socket_status import StreamError, broken, read_end, read_response
from drafter_service.client.socket_writer import SocketWriter
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.frames import MAGIC, Frames, framed
from drafter_service.transport.wire import WireError

READ_BYTES = 1 << 18
HUNG_UP = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)


class SocketStream:
    """A `Stream` over a connected socket."""

    def __init__(self, connection: socket.socket, authorization: str) -> None:
        """The connection is this stream's from now on, even if it raises OSError."""
        self.failure: StreamError | WireError | None = None
        """See `Stream.failure`."""
        self._socket = connection
        try:
            connection.setblocking(False)
            self._wake, self._woken = socket.socketpair()
        except OSError:
            connection.close()
            raise
        self._wake.setblocking(False)
        self._frames = Frames()
        self._writer = SocketWriter(connection, MAGIC + framed(authorization.encode()), self._notify)
        self._is_over = False
        self._is_watched = False
        """Whether `pump` waits for what comes, not only for the end."""
        self._closed = threading.Event()

    def send(self, messages: Sequence[Outgoing]) -> None:
        """Write what is small and first; `pump` sees to the rest."""
        for message in messages:
            self._writer.send(message)

    def end(self) -> None:
        """Close this half of the connection behind all that is to be sent."""
        self._writer.end()

    def receive(self) -> list[pb.DraftResponse]:
        """Read all that is there."""
        responses: list[pb.DraftResponse] = []
        try:
            while not self._is_over:
                data = self._socket.recv(READ_BYTES)
                if not data:
                    self._finish(broken())
                for body, is_last in self._frames.feed(data):
                    if is_last:
                        self._finish(read_end(body))
                        break
                    responses.append(read_response(body))
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
        try:
            # Of all that waits, only this knows fractions of a millisecond.
            return any(select.select([self._socket], [], [], timeout_s))
        except (ValueError, OSError):  # The process has too many files open for it; or the stream was closed just now.
            return self._closed.wait(0) or self._wait_coarsely(timeout_s)

    def watch(self) -> None:
        """Wake `pump`."""
        if not self._is_watched:
            self._is_watched = True
            self._notify()

    def pump(self, on_arrival: Callable[[], None]) -> None:
        """Wait for the end, and for what nobody else waits for."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        events = 0
        while not events & HUNG_UP:
            wanted = (select.POLLIN if self._is_watched else 0) | (select.POLLOUT if self._writer.is_more else 0)
            poll.register(self._socket, wanted | HUNG_UP)
            happened = dict(poll.poll())
            if self._woken.fileno() in happened:
                self._woken.recv(READ_BYTES)
            events = happened.get(self._socket.fileno(), 0)
            if events & select.POLLOUT:
                self._writer.write_some()
            if events & ~select.POLLOUT:
                self._is_watched = False
                on_arrival()

    def cancel(self) -> None:
        """Hang up."""
        self._finish(broken("by this side"))

    def close(self) -> None:
        """Close the socket."""
        self._is_over = True
        self._closed.set()  # Before: whoever waits must not take a closed socket for a broken one.
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors."""
        for each in (self._socket, self._wake, self._woken):
            each.close()

    def _finish(self, failure: StreamError | WireError | None) -> None:
        """It is over; `pump` finds out by the end of the connection."""
        if not self._is_over:
            self._is_over, self.failure = True, failure
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _wait_coarsely(self, timeout_s: float) -> bool:
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(timeout_s * 1e3))
        except (ValueError, OSError):  # It was closed meanwhile.
            return self._closed.wait(timeout_s)

    def _notify(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
