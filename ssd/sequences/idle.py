"""Local indices of sessions between two turns, with a limit on their number and tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from ssd.sequences.local_index import LocalIndex


@dataclass(frozen=True, eq=False)
class Idle:
    """A session between two turns."""

    local: LocalIndex
    turns: frozenset[str | None]
    """Request ids of its turns."""
    since: float
    """Time at which its last turn ended, by the corpus's clock."""


class IdleSessions:
    """The idle sessions, the longest idle first."""

    def __init__(self, most_sessions: int, most_tokens: int) -> None:
        self._most_sessions, self._most_tokens = most_sessions, most_tokens
        self._sessions: OrderedDict[Hashable, Idle] = OrderedDict()
        self._tokens = 0
        """Tokens of all sessions."""

    def keep(self, session: Hashable, idle: Idle) -> None:
        """Keep a session after a turn, and drop the longest idle ones while there are too many sessions or tokens."""
        self.pop(session)
        idle.local.shrink()
        self._sessions[session] = idle
        self._tokens += idle.local.size
        while len(self._sessions) > self._most_sessions or self._tokens > self._most_tokens:
            self.pop(next(iter(self._sessions)))

    def pop(self, session: Hashable) -> Idle | None:
        """Remove a session for its next turn and return it; None if it is not kept."""
        idle = self._sessions.pop(session, None)
        if idle is not None:
            self._tokens -= idle.local.size
        return idle

    def drop(self, is_ended: Callable[[Idle], bool]) -> None:
        """Drop the sessions for which a condition holds."""
        for session in [session for session, idle in self._sessions.items() if is_ended(idle)]:
            self.pop(session)

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return sum(idle.local.nbytes for idle in self._sessions.values())
