"""The lines of a plug-in in its host's log, and which losses of connections are worth one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any


class HostLog(logging.LoggerAdapter[logging.Logger]):
    """Writes lines that begin with `ssd-drafter:`, to a logger below a host's own: its handlers and its level apply."""

    def __init__(self, host_logger: str) -> None:
        super().__init__(logging.getLogger(f"{host_logger}.ssd_drafter"))

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the message with its prefix."""
        return f"ssd-drafter: {msg}", kwargs


def untested(host: str, installed: str, tested: Sequence[str]) -> str:
    """Return that a version of a host was not tested; "" for one of `tested`, which may lack their last number."""
    release = installed.partition("+")[0]
    minor, _, last = release.rpartition(".")
    if release in tested or (minor in tested and last.isdecimal()):
        return ""
    return f"{host} {installed} was not tested, only {', '.join(tested)}"


class ConnectionLog:
    """Reports a loss that concerns several connections once, and its end once. Any thread may call it."""

    def __init__(self, address: str, report: Callable[[str], None], *, has_copy: bool = False) -> None:
        """address: the drafter's. report: writes a message to the host's log. has_copy: see `PluginSettings`."""
        self._address = address
        self._has_copy = has_copy
        self._report = report
        self._reasons: set[str] = set()
        """Reported reasons since a connection last worked again."""
        self._is_lost = False
        """Whether one of them is not a refusal."""
        self._lock = threading.Lock()

    def lost(self, reason: str, is_refused: bool) -> None:
        """Record that a connection was lost. is_refused: whether the service refuses it for good."""
        with self._lock:
            if reason in self._reasons or (self._is_lost and not is_refused):
                return
            self._reasons.add(reason)
            self._is_lost |= not is_refused
        rest = "without drafts"
        if self._has_copy:
            rest = "with drafts from the copy for at most 30 s, then from running requests"
        self._report(f"no connection to the drafter at {self._address} ({reason}); continuing {rest}")

    def resumed(self) -> None:
        """Record that a lost connection works again."""
        with self._lock:
            is_reported = bool(self._reasons)
            self._reasons.clear()
            self._is_lost = False
        if is_reported:
            self._report(f"reconnected to the drafter at {self._address}; drafting resumes")
