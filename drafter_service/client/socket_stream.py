"""The stream over the step socket: the thread that waits for drafts reads them itself."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError

from drafter_service.client.socket_status import StreamError, broken, read_end
from drafter_service.frames import MAGIC, Frames, framed
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.wire import WireError

READ_BYTES = 1 << 18
HUNG_UP = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)


class SocketStream:
    """A `Stream` over a connected socket."""

    def __init__(self, connection: socket.socket, authorization: str) -> None:
        connection.setblocking(False)
        self.failure: StreamError | None = None
        """See `Stream.failure`."""
        self._socket = connection
        self._frames = Frames()
        self._unsent = bytearray(MAGIC + framed(authorization.encode()))
        self._is_ending = False
        """Whether nothing comes after what is unsent."""
        self._is_over = False
        self._is_watched = False
        """Whether `pump` waits for what comes, not only for the end."""
        self._closed = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)

    def send(self, requests: Sequence[pb.DraftRequest]) -> None:
        """Write as much as the socket takes; `pump` sees to the rest."""
        for request in requests:
            self._unsent += framed(request.SerializeToString())
        self._flush()

    def end(self) -> None:
        """Close this half of the connection behind all that is to be sent."""
        self._is_ending = True
        self._flush()

    def receive(self) -> list[pb.DraftResponse]:
        """Read all that is there."""
        if self._unsent:
            self._flush()
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
                    responses.append(pb.DraftResponse.FromString(body))
        except BlockingIOError:
            pass
        except (OSError, WireError, DecodeError) as problem:
            self._finish(broken(problem))
        return responses

    def wait(self, timeout_s: float) -> bool:
        """Wait for the socket itself."""
        timeout_s = max(0.0, timeout_s)
        if self._is_over:
            return self._closed.wait(timeout_s)
        try:
            # Of all that waits, only this knows fractions of a millisecond.
            return any(select.select([self._socket], [self._socket] if self._unsent else [], [], timeout_s))
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
            wanted = (select.POLLIN if self._is_watched else 0) | (select.POLLOUT if self._unsent else 0)
            poll.register(self._socket, wanted | HUNG_UP)
            happened = dict(poll.poll())
            if self._woken.fileno() in happened:
                self._woken.recv(READ_BYTES)
            events = happened.get(self._socket.fileno(), 0)
            if events:
                self._is_watched = False
                on_arrival()

    def cancel(self) -> None:
        """Hang up."""
        self._finish(broken("by this side"))

    def close(self) -> None:
        """Close the socket."""
        self._is_over = True
        for each in (self._socket, self._wake, self._woken):
            each.close()
        self._closed.set()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
            if self._is_ending:
                self._socket.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            self._notify()
        except OSError:  # `pump` finds out, and what it says to it is there to be read.
            self._unsent.clear()

    def _finish(self, failure: StreamError | None) -> None:
        """It is over; `pump` finds out by the end of the connection."""
        if not self._is_over:
            self._is_over, self.failure = True, failure
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _wait_coarsely(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1e3))

    def _notify(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
