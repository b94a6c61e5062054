"""The faults: how each is caused and ended. Traffic runs meanwhile, and the effects are measured afterwards."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from benchmarks.cluster.nodes import CALL_TIMEOUT_S, Cluster, Node
from benchmarks.cluster.texts import Acknowledged
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
NO_DISK = "a disk of its own for the snapshot folder needs root and mount"
NO_CLOCK = "the clock that can be set needs a C compiler"
PUBLISHING_S = 0.1
"""A text is published some milliseconds after it was acknowledged; one that was so just before a kill may be lost."""


class Outcome(NamedTuple):
    """What was seen of a fault that is over."""

    observed: dict[str, Any]
    took_effect: bool = True
    """Whether the observations show the fault; without its effect nothing has been tested."""
    excuses: Callable[[Acknowledged], bool] = lambda _: False
    """Whether a text that a sidecar acknowledged may be lost."""


class Fault(NamedTuple):
    """A fault that can be caused."""

    title: str
    run: Callable[[Cluster], Outcome]
    """Causes the fault and ends it."""
    obstacle: Callable[[Cluster], str] = lambda _: ""
    """Returns why the fault cannot be caused here; empty if it can."""


def kill_sidecar(cluster: Cluster) -> Outcome:
    """Kill the sidecar of the first node, which its supervisor starts again.

    What it had not published yet is excused.
    """
    node, killed_at = cluster.nodes[0], time.monotonic()

    def excuses(text: Acknowledged) -> bool:
        # The time is from before the kill, which takes a moment. The sidecar starts again after `DOWN_S` at least.
        return text.node is node and -DOWN_S < killed_at - text.time < PUBLISHING_S

    node.sidecar.restart(DOWN_S)
    return Outcome({}, excuses=excuses)


def kill_redis(cluster: Cluster) -> Outcome:
    """Kill Redis, and start it again with its append-only file."""
    cluster.redis.restart(DOWN_S)
    return Outcome({})


def kill_engine(cluster: Cluster) -> Outcome:
    """Kill the engine of the first node with all its processes, and start it again."""
    began = time.monotonic()
    cluster.nodes[0].engine.restart(DOWN_S)
    return Outcome({"absent_s": round(time.monotonic() - began, 1)})


def cut_network(cluster: Cluster) -> Outcome:
    """Cut the link of the second node to Redis for a while, so that the sidecars do not exchange what they learn."""
    link = cluster.nodes[1].link
    link.is_whole.clear()
    time.sleep(PARTITION_S)
    link.is_whole.set()
    return Outcome({"partition_s": PARTITION_S})


def fill_disk(cluster: Cluster) -> Outcome:
    """Fill the disk of the first node's snapshots, ask for a snapshot, and make room again."""
    node = cluster.nodes[0]
    before = is_saved(node)
    filler = node.snapshots / "filler"
    with suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(1 << 20))
            file.flush()
    full = is_saved(node)
    time.sleep(DOWN_S)
    filler.unlink()
    after = is_saved(node)
    observed = {"saved_before": before, "saved_while_full": full, "saved_after": after}
    return Outcome(observed, took_effect=before and not full and after)


def is_saved(node: Node) -> bool:
    """Ask for a snapshot; return whether it was saved."""
    with node.stub() as stub:
        try:
            stub.Snapshot(pb.SnapshotRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.RpcError:
            return False
    return True


def move_clock(cluster: Cluster) -> Outcome:
    """Start the second sidecar with a clock that can be set; set it forward, back, and right. It keeps that clock."""
    library, clock, node = cluster.folder / "clock.so", cluster.folder / "clock", cluster.nodes[1]
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(CLOCK_SOURCE)], check=True)
    clock.write_bytes(struct.pack("q", 0))
    node.sidecar.environment |= {"LD_PRELOAD": str(library), CLOCK_VARIABLE: str(clock)}
    node.sidecar.stop()  # It saves its namespaces.
    node.sidecar.start()
    node.sidecar.await_ready()
    seen = []
    # Written in place, because the sidecar has mapped the file.
    with clock.open("r+b", buffering=0) as file:
        for jump in JUMPS_S:
            os.pwrite(file.fileno(), struct.pack("q", jump), 0)
            time.sleep(JUMP_HELD_S)
            # By how many seconds the sidecar's clock is ahead of this one's.
            seen.append(round(node.report()["taken_at"] - time.time()))
    return Outcome({"clock_offsets_s": seen}, took_effect=are_jumps(seen))


def are_jumps(offsets: list[int]) -> bool:
    """Return whether these offsets of a clock, in seconds, are `JUMPS_S`."""
    return all(abs(seen - jump) <= CLOCK_TOLERANCE_S for seen, jump in zip(offsets, JUMPS_S, strict=True))


FAULTS = {
    "sidecar": Fault("kill -9 of a sidecar", kill_sidecar),
    "redis": Fault("kill -9 of Redis", kill_redis),
    "engine": Fault("kill -9 of an engine", kill_engine),
    "partition": Fault("network partition between the sidecars", cut_network),
    "disk": Fault(
        "full disk under the snapshots", fill_disk, lambda cluster: "" if cluster.nodes[0].has_disk else NO_DISK
    ),
    "clock": Fault(
        "a clock that jumps by an hour, forward and back", move_clock, lambda _: "" if shutil.which("cc") else NO_CLOCK
    ),
}
