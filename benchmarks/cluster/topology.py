"""The cluster: nodes of an engine and its sidecar, Redis, and the router before the engines."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from benchmarks.cluster import engines
from benchmarks.cluster.engines import EngineKind
from benchmarks.cluster.link import Link
from benchmarks.cluster.processes import ManagedProcess
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
from drafter_service.transport.wire import MESSAGE_SIZES
from ssd.errors import UserError

HOST = "127.0.0.1"
DISK_BYTES = 256 << 20
"""Size of the disk of a snapshot folder, where it may have one of its own."""
CALL_TIMEOUT_S = 60.0
SNAPSHOT_S = 30
HEALTH_TIMEOUT_S = 1.0
REDIS_PERSISTENCE = ("--save", "", "--appendonly", "yes", "--appendfsync", "everysec")


@dataclass(frozen=True)
class Settings:
    """What the cluster runs."""

    engine: EngineKind
    python: Path
    """Interpreter of the engines, if they are vLLM."""
    logs: Path
    """Folder for the output of all processes."""
    capacity: int = 1_000_000
    """Tokens that a sidecar remembers."""
    cost: float | None = None
    """Cost of verifying a token that sidecars assume; None: they learn the durations of steps, as by default."""
    sidecar_environment: Mapping[str, str] = field(default_factory=dict)


class Node:
    """An engine, its sidecar, and the sidecar's link to Redis."""

    def __init__(self, name: str, folder: Path, redis_port: int, settings: Settings) -> None:
        self.name = name
        self.snapshots = folder / "snapshots"
        self.snapshots.mkdir(parents=True)
        self.has_disk = False
        """Whether the snapshot folder is a disk of its own."""
        self.link = Link(redis_port)
        self.link.open()
        self.address = f"unix:{folder}/drafter.sock"
        """Address of the sidecar."""
        self.port = free_port()
        """Port of the engine."""
        logs = settings.logs
        self.metrics = f"{HOST}:{free_port()}"
        """Address of the sidecar's metrics."""
        command = [sys.executable, "-m", "drafter_service.commands.main", "serve", "--log-level", "warning"]
        command += ["--listen", self.address, "--capacity", str(settings.capacity), "--metrics", self.metrics]
        command += ["--snapshot-folder", str(self.snapshots), "--set", f"snapshots.interval_s={SNAPSHOT_S}"]
        command += ["--log", f"redis://{HOST}:{self.link.port}"]
        command += [] if settings.cost is None else ["--set", f"drafting.cost={settings.cost}"]
        self.sidecar = ManagedProcess(
            f"sidecar {name}",
            command,
            logs / f"sidecar-{name}.log",
            lambda: is_serving(self.address),
            {"PYTHONPATH": str(engines.ROOT), **settings.sidecar_environment},
        )
        command, environment = engines.command(settings.engine, settings.python, self.port, self.address)
        self.engine = ManagedProcess(
            f"engine {name}", command, logs / f"engine-{name}.log", lambda: engines.is_ready(self.port), environment
        )

    def restart_sidecar(self) -> None:
        """Stop the sidecar, which saves its namespaces, and start it again."""
        self.sidecar.stop()
        self.sidecar.start()
        self.sidecar.await_ready()

    @contextmanager
    def stub(self) -> Iterator[DrafterServiceStub]:
        """Connect to the sidecar for calls."""
        with grpc.insecure_channel(self.address, options=MESSAGE_SIZES) as channel:
            yield DrafterServiceStub(channel)

    def report(self) -> dict[str, Any]:
        """Return the report of the sidecar."""
        with self.stub() as stub:
            return json.loads(stub.Report(pb.ReportRequest(), timeout=CALL_TIMEOUT_S).json)


@dataclass
class Cluster:
    """All processes."""

    nodes: list[Node]
    redis: ManagedProcess
    router: ManagedProcess
    router_port: int
    folder: Path

    @property
    def processes(self) -> list[ManagedProcess]:
        """Every process, in the order of reports."""
        return [
            *(node.engine for node in self.nodes),
            *(node.sidecar for node in self.nodes),
            self.redis,
            self.router,
        ]


@contextmanager
def running_cluster(nodes: int, settings: Settings) -> Iterator[Cluster]:
    """Run a cluster of this number of nodes. Raises UserError if Redis is not installed, SystemExit if a process
    ends."""
    if shutil.which("redis-server") is None:
        raise UserError("redis-server is not installed; run: apt-get install redis-server")
    settings.logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ssd-")))
        cluster = _make(folder, nodes, settings)
        for node in cluster.nodes:
            stack.callback(node.link.close)
            node.has_disk = mount(node.snapshots)
            if node.has_disk:
                stack.callback(subprocess.run, ["umount", "--lazy", str(node.snapshots)], check=True)
        for process in (cluster.redis, *(node.sidecar for node in cluster.nodes)):
            start(stack, [process])
        start(stack, [node.engine for node in cluster.nodes])
        start(stack, [cluster.router])
        yield cluster


def start(stack: ExitStack, processes: Sequence[ManagedProcess]) -> None:
    """Start processes together, and wait until they are ready."""
    for process in processes:
        stack.callback(process.stop)
        process.start()
    for process in processes:
        process.await_ready()


def _make(folder: Path, nodes: int, settings: Settings) -> Cluster:
    redis_port, router_port = free_port(), free_port()
    redis = ManagedProcess(
        "Redis",
        ["redis-server", "--bind", HOST, "--port", str(redis_port), "--dir", str(folder), *REDIS_PERSISTENCE],
        settings.logs / "redis.log",
        lambda: accepts(redis_port),
    )
    made = [Node("ab"[number], folder / "ab"[number], redis_port, settings) for number in range(nodes)]
    router = ManagedProcess(
        "router",
        [sys.executable, "-m", "benchmarks.cluster.router", str(router_port), *(str(node.port) for node in made)],
        settings.logs / "router.log",
        lambda: accepts(router_port),
        {"PYTHONPATH": str(engines.ROOT)},
    )
    return Cluster(made, redis, router, router_port, folder)


def mount(folder: Path) -> bool:
    """Give a folder a small disk of its own, in memory; return whether that is permitted."""
    if os.geteuid() != 0:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


def is_serving(address: str) -> bool:
    """Return whether the sidecar at an address serves."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S
            )
        except grpc.RpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def accepts(port: int) -> bool:
    """Return whether a port accepts connections."""
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
