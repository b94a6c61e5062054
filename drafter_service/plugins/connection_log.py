"""Messages about lost connections, for a host whose namespaces have a connection each to the same drafter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable


class ConnectionLog:
    """Reports a loss that concerns several connections once, and its end once. Any thread may call it."""

    def __init__(self, address: str, report: Callable[[str], None]) -> None:
        """address: the drafter's. report: writes a message to the host's log."""
        self._address = address
        self._report = report
        self._lost: dict[Hashable, str] = {}
        """Reasons of the current losses, by connection."""
        self._lock = threading.Lock()

    def lost(self, connection: Hashable, reason: str) -> None:
        """Record that a connection was lost."""
        with self._lock:
            is_known = reason in self._lost.values()
            self._lost[connection] = reason
        if not is_known:
            self._report(f"no connection to the drafter at {self._address} ({reason}); continuing without drafts")

    def resumed(self, connection: Hashable) -> None:
        """Record that a lost connection works again."""
        if self._remove(connection):
            self._report(f"reconnected to the drafter at {self._address}; drafting resumes")

    def closed(self, connection: Hashable) -> None:
        """Record that a connection was closed by its owner."""
        self._remove(connection)

    def _remove(self, connection: Hashable) -> bool:
        """Forget a loss; return whether it was the last one of its reason."""
        with self._lock:
            reason = self._lost.pop(connection, None)
            return reason is not None and reason not in self._lost.values()
