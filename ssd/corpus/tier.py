"""One sorted order in two buffers: queries read one while the maintainer writes the next into the other."""

from __future__ import annotations

import threading
import weakref

import numpy as np

from ssd.corpus.memory import Buffer


class Order:
    """Sorted positions, never changed while anybody holds this object. Whoever reads them holds it."""

    __slots__ = ("__weakref__", "address", "positions")

    def __init__(self, positions: np.ndarray) -> None:
        self.positions = positions
        """uint32 [N]."""
        self.address: int = positions.ctypes.data

    def __len__(self) -> int:
        return len(self.positions)


def empty_order() -> Order:
    """An order of nothing. A new one each time: that nobody reads it any more must be seen."""
    return Order(np.empty(0, np.uint32))


class Tier:
    """The newest order over a text, and the buffer for its successor."""

    def __init__(self, room: int) -> None:
        """`room`: most positions that an order may have."""
        self.order = empty_order()
        self._front, self._back = Buffer(room), Buffer(room)
        self._unread = threading.Event()
        self._unread.set()
        self._retired: weakref.ref[Order] | None = None

    def next_buffer(self) -> Buffer:
        """The buffer to write the next order into, once nobody reads the order that was in it. Queries never wait."""
        self.wait_until_unread()
        return self._back

    def publish(self, size: int) -> None:
        """Make the first `size` positions of the next buffer the newest order."""
        self.replace(Order(self._back.array[:size]))
        self._front, self._back = self._back, self._front

    def replace(self, order: Order) -> None:
        """Make an order that lies elsewhere the newest, which may be read-only."""
        self.wait_until_unread()
        unread = threading.Event()
        self._unread = unread
        self._retired = weakref.ref(self.order, lambda _: unread.set())
        self.order = order

    def wait_until_unread(self, timeout_s: float | None = None) -> bool:
        """Wait until nobody holds the order before the newest one; returns whether that is so."""
        return self._unread.wait(timeout_s)

    def release(self) -> None:
        """Give back the memory of the next buffer, once nobody reads it."""
        self.wait_until_unread()
        self._back.release()

    @property
    def nbytes(self) -> int:
        """Memory of the newest order."""
        return self.order.positions.nbytes
