"""Keeps namespaces in step with other replicas through the shared log, if there is one."""

from __future__ import annotations

from drafter_service.facts import LogFacts
from drafter_service.learning import Learning
from drafter_service.namespace import Namespace
from drafter_service.settings.tree import Log


class Replication:
    """Publishes what is learned here first, and learns what others published."""

    def __init__(self, config: Log, learning: Learning) -> None:
        self._config = config
        self._learning = learning

    async def start(self) -> None:
        """Connect."""

    async def stop(self) -> None:
        """Publish what waits, then disconnect."""

    def joined(self, namespace: Namespace) -> None:
        """A namespace was loaded."""

    def left(self, namespace: Namespace) -> None:
        """A namespace leaves memory."""

    def facts(self) -> LogFacts | None:
        """How the log is doing; None without one."""
        return None
