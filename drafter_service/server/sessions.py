"""Sessions of clients whose stream has broken, kept for a grace time so that they can go on."""

from __future__ import annotations

import asyncio

from drafter_service.server.namespace import Namespace
from drafter_service.server.session import Session


class Orphans:
    """Sessions without a stream, by client. The event loop alone uses it."""

    def __init__(self, grace_s: float, most: int) -> None:
        """`most`: sessions that are kept at a time; the oldest go first."""
        self._grace_s = grace_s
        self._most = most
        self._kept: dict[tuple[str, bytes, str], tuple[Session, asyncio.TimerHandle]] = {}

    def keep(self, owner: str, client_id: bytes, session: Session) -> None:
        """Keep a session for the grace time, then drop it; at once if the client has no id to come back with."""
        if not client_id or self._grace_s == 0 or session.namespace.is_closed:
            session.close()
            return
        key = (owner, client_id, session.namespace.name)
        self._drop(key)
        if len(self._kept) == self._most:
            self._drop(next(iter(self._kept)))
        timer = asyncio.get_running_loop().call_later(self._grace_s, self._drop, key)
        self._kept[key] = session, timer

    def adopt(self, owner: str, client_id: bytes, namespace: Namespace) -> Session | None:
        """The session of a client that has come back; only the caller who left it gets it."""
        key = (owner, client_id, namespace.name)
        if key not in self._kept:
            return None
        session, timer = self._kept[key]
        if session.namespace is not namespace:
            # The namespace was dropped meanwhile, and made again.
            self._drop(key)
            return None
        del self._kept[key]
        timer.cancel()
        return session

    def drop_all(self, namespace: str | None = None) -> None:
        """Drop the sessions of a namespace, or of all."""
        for key in [key for key in self._kept if namespace in (None, key[2])]:
            self._drop(key)

    def __len__(self) -> int:
        return len(self._kept)

    def _drop(self, key: tuple[str, bytes, str]) -> None:
        session, timer = self._kept.pop(key, (None, None))
        if session is not None and timer is not None:
            timer.cancel()
            session.close()
