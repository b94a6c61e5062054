"""The indices of sessions between two turns, within a bound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from ssd.sequences.local_index import LocalIndex


@dataclass(frozen=True, eq=False)
class Idle:
    """The index of a session between two turns."""

    local: LocalIndex
    turns: frozenset[str | None]
    """Request ids of its turns."""
    since: float
    """By the corpus's clock."""


class IdleSessions:
    """Sessions that may go on, the longest idle first."""

    def __init__(self, most_sessions: int, most_tokens: int) -> None:
        self._most_sessions, self._most_tokens = most_sessions, most_tokens
        self._sessions: OrderedDict[Hashable, Idle] = OrderedDict()
        self._tokens = 0
        """Of all of them."""

    def keep(self, session: Hashable, idle: Idle) -> None:
        """A turn has ended. The longest idle sessions leave for it, where there are too many or they are too long."""
        self.take(session)
        idle.local.give_back()
        self._sessions[session] = idle
        self._tokens += idle.local.size
        while len(self._sessions) > self._most_sessions or self._tokens > self._most_tokens:
            self.take(next(iter(self._sessions)))

    def take(self, session: Hashable) -> Idle | None:
        """The next turn begins: what is kept of the session, which is its own now; None if nothing is."""
        idle = self._sessions.pop(session, None)
        if idle is not None:
            self._tokens -= idle.local.size
        return idle

    def end(self, is_ended: Callable[[Idle], bool]) -> None:
        """Let go of some."""
        for session in [session for session, idle in self._sessions.items() if is_ended(idle)]:
            self.take(session)

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(idle.local.nbytes for idle in self._sessions.values())
