"""What is to be written to the step socket, in order, and by whom.

A small message is written at once by the thread that has it sent: to wake another would cost more. Long ones, and
whatever comes behind them, are for the thread that pumps, which makes their bytes and writes them a slice at a time.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable

from drafter_service.client.outgoing import Outgoing
from drafter_service.transport.frames import framed

AT_ONCE_BYTES = 16 << 10
"""Texts up to here are small: they are copied in some 10 us."""
SLICE_BYTES = 1 << 18
NOTHING = memoryview(b"")


class SocketWriter:
    """The outward half of a connection that does not block. One thread at a time calls `send` and `end`."""

    def __init__(self, connection: socket.socket, greeting: bytes, wake: Callable[[], None]) -> None:
        """`wake`: has the thread that pumps call `write_some` while there `is_more`."""
        self._socket = connection
        self._wake = wake
        self._turn = threading.Lock()
        """Held by whoever writes."""
        self._data = memoryview(greeting)
        """What is left of the frame in hand."""
        self._waiting: deque[Outgoing] = deque()
        self._is_ending = False
        """Whether nothing comes after what is waiting."""
        self._is_over = False

    @property
    def is_more(self) -> bool:
        """Whether there is something to write."""
        return not self._is_over and bool(self._data or self._waiting or self._is_ending)

    def send(self, message: Outgoing) -> None:
        """Have a message sent; never waits."""
        if not (message.text_bytes <= AT_ONCE_BYTES and self._write_now(message)):
            self._waiting.append(message)
        if self.is_more:
            self._wake()

    def end(self) -> None:
        """Close this half of the connection behind all that is to be sent."""
        self._is_ending = True
        self._wake()

    def write_some(self) -> None:
        """As much as the connection takes, but no more than a slice."""
        with self._turn:
            if not self._data and self._waiting:
                self._data = _frame_of(self._waiting.popleft())
            self._write()

    def _write_now(self, message: Outgoing) -> bool:
        """Write a message, or as much as the connection takes, if none is before it; whether that was so."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            if self._data or self._waiting or self._is_over:
                return self._is_over
            self._data = _frame_of(message)
            self._write()
            return True
        finally:
            self._turn.release()

    def _write(self) -> None:
        try:
            if self._data:
                # An empty view would keep the whole frame in memory.
                self._data = self._data[self._socket.send(self._data[:SLICE_BYTES]) :] or NOTHING
            elif self._is_ending and not self._waiting:
                self._is_over = True
                self._socket.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:  # `pump` finds out, and what the service says to it is there to be read.
            self._is_over = True
            self._data = NOTHING
            self._waiting.clear()


def _frame_of(message: Outgoing) -> memoryview:
    return memoryview(framed(message.message().SerializeToString()))
