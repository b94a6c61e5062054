"""The faults: how each is caused and ended.

A fault is a class. `run` causes it and returns once it is over; then its effects are measured. Traffic runs meanwhile.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from benchmarks.cluster.learned import Acknowledged
from benchmarks.cluster.processes import ManagedProcess
from benchmarks.cluster.topology import Cluster, Node

DOWN_S = 3.0
"""Seconds from a kill to the start of the same process, as of a supervisor."""
PARTITION_S = 12.0
"""More than the 10 s after which a sidecar gives up a call to Redis."""
PUBLISHING_S = 0.1
"""A text is published some milliseconds after it was acknowledged; one that was so just before a kill may be lost."""


class Fault(ABC):
    """A fault and its end."""

    name: str
    title: str

    @abstractmethod
    def run(self, cluster: Cluster) -> None:
        """Cause the fault and end it."""

    def excuses(self, _text: Acknowledged) -> bool:
        """Return whether a text that a sidecar acknowledged may be lost."""
        return False


class SidecarKilled(Fault):
    """A sidecar is killed and started again by its supervisor."""

    name, title = "sidecar", "kill -9 of a sidecar"

    def __init__(self) -> None:
        self._killed: tuple[Node, float] | None = None

    def run(self, cluster: Cluster) -> None:
        """Kill the sidecar of the first node."""
        node = cluster.nodes[0]
        self._killed = node, time.monotonic()
        restart(node.sidecar)

    def excuses(self, text: Acknowledged) -> bool:
        """Excuse what the killed sidecar had not published yet."""
        if self._killed is None:
            return False
        # The time is from before the kill, which takes a moment. The sidecar starts again after `DOWN_S` at least.
        node, killed_at = self._killed
        return text.node is node and -DOWN_S < killed_at - text.time < PUBLISHING_S


class RedisKilled(Fault):
    """Redis is killed and started again with its append-only file."""

    name, title = "redis", "kill -9 of Redis"

    def run(self, cluster: Cluster) -> None:
        """Kill Redis."""
        restart(cluster.redis)


class EngineKilled(Fault):
    """An engine is killed with all its processes and started again."""

    name, title = "engine", "kill -9 of an engine"

    def run(self, cluster: Cluster) -> None:
        """Kill the engine of the first node."""
        restart(cluster.nodes[0].engine)


class Partitioned(Fault):
    """A sidecar and Redis do not reach each other, so the sidecars do not exchange what they learn."""

    name, title = "partition", "network partition between the sidecars"

    def run(self, cluster: Cluster) -> None:
        """Cut the link of the second node and heal it."""
        link = cluster.nodes[1].link
        link.cut()
        time.sleep(PARTITION_S)
        link.heal()


FAULTS: dict[str, Callable[[], Fault]] = {
    fault.name: fault for fault in (SidecarKilled, RedisKilled, EngineKilled, Partitioned)
}


def restart(process: ManagedProcess) -> None:
    """Kill a process, and start it again after a while."""
    process.kill()
    time.sleep(DOWN_S)
    process.start()
    process.await_ready()
