"""The faults: how each is caused and ended.

A fault is a class. `run` causes it and returns once it is over; then its effects are measured. Traffic runs meanwhile.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from benchmarks.cluster.learned import Acknowledged
from benchmarks.cluster.processes import ManagedProcess
from benchmarks.cluster.topology import CALL_TIMEOUT_S, Cluster, Node
from drafter_service.stubs import drafter_pb2 as pb

DOWN_S = 3.0
"""Seconds from a kill to the start of the same process, as of a supervisor."""
PARTITION_S = 12.0
"""More than the 10 s after which a sidecar gives up a call to Redis."""
JUMPS_S = (0, 3600, -3600, 0)
"""Offsets of the clock that jumps, in this order."""
JUMP_HELD_S = 5.0
CLOCK_TOLERANCE_S = 2
"""A report is some time old when it is read."""
CLOCK_SOURCE, CLOCK_VARIABLE = Path(__file__).with_name("clock.c"), "SSD_CLOCK_OFFSET"
PUBLISHING_S = 0.1
"""A text is published some milliseconds after it was acknowledged; one that was so just before a kill may be lost."""


class Fault(ABC):
    """A fault and its end."""

    name: str
    title: str

    def obstacle(self, _cluster: Cluster) -> str:
        """Return why the fault cannot be caused here; empty if it can."""
        return ""

    @abstractmethod
    def run(self, cluster: Cluster) -> dict[str, Any]:
        """Cause the fault and end it; return observations."""

    def took_effect(self, _observed: Mapping[str, Any]) -> bool:
        """Return whether the observations of `run` show the fault; without its effect nothing has been tested."""
        return True

    def excuses(self, _text: Acknowledged) -> bool:
        """Return whether a text that a sidecar acknowledged may be lost."""
        return False


class SidecarKilled(Fault):
    """A sidecar is killed and started again by its supervisor."""

    name, title = "sidecar", "kill -9 of a sidecar"

    def __init__(self) -> None:
        self._killed: tuple[Node, float] | None = None

    def run(self, cluster: Cluster) -> dict[str, Any]:
        """Kill the sidecar of the first node."""
        node = cluster.nodes[0]
        self._killed = node, time.monotonic()
        restart(node.sidecar)
        return {}

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

    def run(self, cluster: Cluster) -> dict[str, Any]:
        """Kill Redis."""
        restart(cluster.redis)
        return {}


class EngineKilled(Fault):
    """An engine is killed with all its processes and started again."""

    name, title = "engine", "kill -9 of an engine"

    def run(self, cluster: Cluster) -> dict[str, Any]:
        """Kill the engine of the first node."""
        began = time.monotonic()
        restart(cluster.nodes[0].engine)
        return {"absent_s": round(time.monotonic() - began, 1)}


class Partitioned(Fault):
    """A sidecar and Redis do not reach each other, so the sidecars do not exchange what they learn."""

    name, title = "partition", "network partition between the sidecars"

    def run(self, cluster: Cluster) -> dict[str, Any]:
        """Cut the link of the second node and heal it."""
        link = cluster.nodes[1].link
        link.cut()
        time.sleep(PARTITION_S)
        link.heal()
        return {"partition_s": PARTITION_S}


class DiskFull(Fault):
    """The disk of a snapshot folder is full."""

    name, title = "disk", "full disk under the snapshots"

    def obstacle(self, cluster: Cluster) -> str:
        """Return why there is no disk to fill."""
        return "" if cluster.nodes[0].has_disk else "a disk of its own for the snapshot folder needs root and mount"

    def run(self, cluster: Cluster) -> dict[str, Any]:
        """Fill the disk, ask for a snapshot, and make room again."""
        node = cluster.nodes[0]
        saved_before = _saved(node)
        filler = node.snapshots / "filler"
        with suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        saved_full = _saved(node)
        time.sleep(DOWN_S)
        filler.unlink()
        return {"saved_before": saved_before, "saved_while_full": saved_full, "saved_after": _saved(node)}

    def took_effect(self, observed: Mapping[str, Any]) -> bool:
        """Return whether snapshots failed only while the disk was full."""
        return observed["saved_before"] and not observed["saved_while_full"] and observed["saved_after"]


class ClockJumped(Fault):
    """The clock of a sidecar's machine is set forward and back."""

    name, title = "clock", "a clock that jumps by an hour, forward and back"

    def obstacle(self, _cluster: Cluster) -> str:
        """Return that the clock cannot be built, if so."""
        return "" if shutil.which("cc") else "the clock that can be set needs a C compiler"

    def run(self, cluster: Cluster) -> dict[str, Any]:
        """Start the second sidecar with a clock that can be set; set it forward, back, and right.

        It keeps that clock.
        """
        library, node = cluster.folder / "clock.so", cluster.nodes[1]
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(CLOCK_SOURCE)], check=True)
        self._set(cluster, 0)
        node.sidecar.environment |= {"LD_PRELOAD": str(library), CLOCK_VARIABLE: str(_clock_file(cluster))}
        node.restart_sidecar()
        seen = []
        for jump in JUMPS_S:
            self._set(cluster, jump)
            time.sleep(JUMP_HELD_S)
            seen.append(_clock_offset(node))
        return {"clock_offsets_s": seen}

    def took_effect(self, observed: Mapping[str, Any]) -> bool:
        """Return whether the sidecar's clock was ahead by each jump."""
        pairs = zip(observed["clock_offsets_s"], JUMPS_S, strict=True)
        return all(abs(seen - jump) <= CLOCK_TOLERANCE_S for seen, jump in pairs)

    @staticmethod
    def _set(cluster: Cluster, seconds: int) -> None:
        # Written in place, because the sidecar has mapped the file.
        file = os.open(_clock_file(cluster), os.O_CREAT | os.O_WRONLY)
        os.write(file, struct.pack("q", seconds))
        os.close(file)


FAULTS: dict[str, Callable[[], Fault]] = {
    fault.name: fault for fault in (SidecarKilled, RedisKilled, EngineKilled, Partitioned, DiskFull, ClockJumped)
}


def restart(process: ManagedProcess) -> None:
    """Kill a process, and start it again after a while."""
    process.kill()
    time.sleep(DOWN_S)
    process.start()
    process.await_ready()


def _saved(node: Node) -> bool:
    """Ask for a snapshot; return whether it was saved."""
    with node.stub() as stub:
        try:
            stub.Snapshot(pb.SnapshotRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.RpcError:
            return False
    return True


def _clock_file(cluster: Cluster) -> Path:
    return cluster.folder / "clock"


def _clock_offset(node: Node) -> int:
    """Return by how many seconds the sidecar's clock is ahead of this one's."""
    return round(node.report()["taken_at"] - time.time())
