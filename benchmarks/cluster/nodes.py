"""The cluster: nodes of an engine and its sidecar, and Redis, each in a process of its own.

Each sidecar reaches Redis through a link that can be cut.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any, NamedTuple
from urllib.request import urlopen

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.hosts.engines import HOSTS, NULL_PROPOSER
from benchmarks.support.command import ROOT
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
from drafter_service.transport.wire import MESSAGE_SIZES
from engine.models.shipped import SHIPPED_MODEL

HOST = "127.0.0.1"
PYTHON_PATH = {"PYTHONPATH": str(ROOT)}
MAX_DRAFT, MAX_SEQUENCES = 16, 32
DEADLINE_S = 0.25
"""Longest time that a step of vLLM waits for a draft: long, so that a stalled machine causes a slow step and not a
missing draft. The engine of this project waits 10 ms (engine/drafters/registry.py).
"""
DISK_BYTES = 256 << 20
"""Size of the disk of a snapshot folder, where it may have one of its own."""
SNAPSHOT_S = 30
START_TIMEOUT_S, STOP_TIMEOUT_S, CALL_TIMEOUT_S, PROBE_TIMEOUT_S = 300.0, 60.0, 60.0, 2.0
REDIS_PERSISTENCE = ("--save", "", "--appendonly", "yes", "--appendfsync", "everysec")


def add_options(parser: argparse.ArgumentParser, out: Path) -> None:
    """Add the options that choose the engines and the folder of results."""
    parser.add_argument("--engine", choices=("ssd", "vllm"), help="default: vllm if --hosts exists, else ssd")
    parser.add_argument("--hosts", type=Path, default=HOSTS, help=f"virtual environment with vLLM ({HOSTS})")
    parser.add_argument("--out", type=Path, default=out, help="folder for results and logs")


def check_options(options: argparse.Namespace) -> None:
    """Choose the engine if none is given, and make the folder. Raises SystemExit if something is not installed."""
    python = options.hosts / "bin" / "python"
    options.engine = options.engine or ("vllm" if python.exists() else "ssd")
    if options.engine == "vllm" and not python.exists():
        raise SystemExit(f"there is no {python}; run `make hosts`, or choose --engine ssd")
    if shutil.which("redis-server") is None:
        raise SystemExit("redis-server is not installed; run: apt-get install redis-server")
    (options.out / "logs").mkdir(parents=True, exist_ok=True)


class Usage(NamedTuple):
    """Resources of a process and all its children."""

    cpu_s: float
    """Processor time, including that of earlier runs that were killed or stopped."""
    memory_bytes: int
    """Proportional set size: pages that processes share count once."""
    threads: int
    descriptors: int


class ManagedProcess:
    """A command that runs in a process group of its own, with its output in a file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        logs: Path,
        is_ready: Callable[[], bool],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """name: for reports. logs: folder for the output. environment: variables besides the current."""
        self.name = name
        self.command = list(command)
        self.environment = dict(environment or {})
        self._log, self._is_ready = logs / f"{name.replace(' ', '-')}.log", is_ready
        self._process: psutil.Popen | None = None
        self._past_cpu_s = 0.0

    def start(self) -> None:
        """Start the process without waiting until it is ready."""
        with self._log.open("ab") as output:
            self._process = psutil.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )

    def await_ready(self) -> None:
        """Return once the process serves. Raises SystemExit if it ends, or is not ready in time."""
        until = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            if self._process is None or self._process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{self.name} did not start; see {self._log}")
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill the process and its children with SIGKILL, as the kernel does when memory runs out."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ask the process to end, and kill what is left of it after a while."""
        self._end(signal.SIGTERM)

    def restart(self, pause_s: float) -> None:
        """Kill the process, and start it again after a pause."""
        self.kill()
        time.sleep(pause_s)
        self.start()
        self.await_ready()

    def usage(self) -> Usage:
        """Return the resources that the process and its children use now."""
        used = [Usage(self._past_cpu_s, 0, 0, 0)]
        # A process may end while it is read.
        with suppress(psutil.NoSuchProcess):
            for each in [] if self._process is None else [self._process, *self._process.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    # Of the process, and of its children that have ended.
                    cpu_s = sum(each.cpu_times()[:4])
                    used.append(Usage(cpu_s, each.memory_full_info().pss, each.num_threads(), each.num_fds()))
        return Usage(*map(sum, zip(*used, strict=True)))

    def _end(self, number: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        self._past_cpu_s = self.usage().cpu_s
        if process.poll() is None:
            process.send_signal(number)
        with suppress(psutil.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._process = None


class Link(ThreadingTCPServer):
    """A network link to a port of this machine that can be cut.

    While it is cut it holds all bytes, and connections are accepted but not forwarded, so that neither end learns of
    it. After it is healed everything arrives, as TCP delivers it after a partition.
    """

    daemon_threads = True

    def __init__(self, target_port: int) -> None:
        super().__init__((HOST, 0), self._forward)
        self._target_port = target_port
        self.is_whole = threading.Event()
        """Clear it to cut the link, and set it to heal it."""
        self.is_whole.set()
        self.bytes = 0
        """Bytes forwarded in both directions."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Forward connections in threads."""
        thread = threading.Thread(target=self.serve_forever, name="link", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            self.server_close()

    def _forward(self, client: socket.socket, *_: object) -> None:
        """Forward both directions of a connection until it ends."""
        self.is_whole.wait()
        with suppress(OSError), socket.create_connection((HOST, self._target_port)) as target:
            back = threading.Thread(target=self._copy, args=(target, client), daemon=True)
            back.start()
            self._copy(client, target)
            back.join()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while part := source.recv(1 << 16):
                self.is_whole.wait()
                self.bytes += len(part)
                target.sendall(part)
        self.is_whole.wait()
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


class Node:
    """An engine, its sidecar, and the sidecar's link to Redis."""

    def __init__(
        self, name: str, folder: Path, redis_port: int, options: argparse.Namespace, sidecar_arguments: Sequence[str]
    ) -> None:
        self.name = name
        self.snapshots = folder / "snapshots"
        self.snapshots.mkdir(parents=True)
        self.has_disk = False
        """Whether the snapshot folder is a disk of its own."""
        self.link = Link(redis_port)
        self.address = f"unix:{folder}/drafter.sock"
        """Address of the sidecar."""
        self.port = free_port()
        """Port of the engine."""
        self.metrics = f"{HOST}:{free_port()}"
        """Address of the sidecar's metrics."""
        command = [sys.executable, "-m", "drafter_service.commands.main", "serve", "--log-level", "warning"]
        command += ["--listen", self.address, "--metrics", self.metrics]
        command += ["--snapshot-folder", str(self.snapshots), "--set", f"snapshots.interval_s={SNAPSHOT_S}"]
        command += ["--log", f"redis://{HOST}:{self.link.server_address[1]}"]
        logs = options.out / "logs"
        self.sidecar = ManagedProcess(
            f"sidecar {name}", [*command, *sidecar_arguments], logs, lambda: is_serving(self.address), PYTHON_PATH
        )
        command, environment = engine_command(options, self.port, self.address)
        self.engine = ManagedProcess(f"engine {name}", command, logs, lambda: is_healthy(self.port), environment)

    @contextmanager
    def stub(self) -> Iterator[DrafterServiceStub]:
        """Connect to the sidecar for calls."""
        with grpc.insecure_channel(self.address, options=MESSAGE_SIZES) as channel:
            yield DrafterServiceStub(channel)

    def report(self) -> dict[str, Any]:
        """Return the report of the sidecar."""
        with self.stub() as stub:
            return json.loads(stub.Report(pb.ReportRequest(), timeout=CALL_TIMEOUT_S).json)


def engine_command(options: argparse.Namespace, port: int, sidecar: str) -> tuple[list[str], dict[str, str]]:
    """Return the command of an engine that drafts with a sidecar, and variables of its environment."""
    environment = {**PYTHON_PATH, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    if options.engine == "ssd":
        arguments = ["-m", "engine.commands.main", "serve", "--port", str(port), "--threads", "1"]
        arguments += ["--drafter", "ssd-remote", "--address", sidecar, "--max-draft", str(MAX_DRAFT)]
        arguments += ["--max-sequences", str(MAX_SEQUENCES), "--kv-memory", "128"]
        return [sys.executable, *arguments], environment
    folder = (options.hosts / "bin").absolute()
    arguments = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(SHIPPED_MODEL)]
    arguments += ["--served-model-name", SHIPPED_MODEL.name]
    arguments += ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    arguments += ["--max-num-seqs", str(MAX_SEQUENCES), "--disable-uvicorn-access-log"]
    arguments += ["--scheduler-cls", "drafter_service.plugins.vllm.Scheduler"]
    arguments += ["--speculative-config", json.dumps({**NULL_PROPOSER, "num_speculative_tokens": MAX_DRAFT})]
    environment |= {
        "SSD_PLUGIN": json.dumps({"sidecar": sidecar, "deadline_s": DEADLINE_S}),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Otherwise all engines of a machine choose the same core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # vLLM starts commands of its environment.
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    # The workers of vLLM spin while they wait. The last core is left to the other processes.
    cores = f"0-{max(0, (os.cpu_count() or 1) - 2)}"
    return ["taskset", "--cpu-list", cores, str(folder / "python"), *arguments], environment


@dataclass
class Cluster:
    """All processes."""

    nodes: list[Node]
    redis: ManagedProcess
    folder: Path

    @property
    def processes(self) -> list[ManagedProcess]:
        """Every process, in the order of reports."""
        return [*(node.engine for node in self.nodes), *(node.sidecar for node in self.nodes), self.redis]

    @property
    def engine_ports(self) -> list[int]:
        """The port of each engine."""
        return [node.port for node in self.nodes]


@contextmanager
def running_cluster(count: int, options: argparse.Namespace, *sidecar_arguments: str) -> Iterator[Cluster]:
    """Run a cluster of this number of nodes. options: see `check_options`. Raises SystemExit if a process ends."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ssd-")))
        port = free_port()
        command = ["redis-server", "--bind", HOST, "--port", str(port), "--dir", str(folder), *REDIS_PERSISTENCE]
        redis = ManagedProcess("Redis", command, options.out / "logs", lambda: accepts(port))
        nodes = [Node(name, folder / name, port, options, sidecar_arguments) for name in "ab"[:count]]
        for node in nodes:
            stack.enter_context(node.link.running())
            node.has_disk = mount(node.snapshots)
            if node.has_disk:
                stack.callback(subprocess.run, ["umount", "--lazy", str(node.snapshots)], check=True)
        # Engines start together, which takes them longest.
        for processes in ([redis], *([node.sidecar] for node in nodes), [node.engine for node in nodes]):
            for process in processes:
                stack.callback(process.stop)
                process.start()
            for process in processes:
                process.await_ready()
        yield Cluster(nodes, redis, folder)


@contextmanager
def in_background(work: Callable[[threading.Event], object]) -> Iterator[None]:
    """Run a function in a thread. It gets an event that is set when the context ends, and must then return."""
    stopping = threading.Event()
    thread = threading.Thread(target=work, args=(stopping,))
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def mount(folder: Path) -> bool:
    """Give a folder a small disk of its own, in memory; return whether that is permitted."""
    if os.geteuid() != 0:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


def is_serving(address: str) -> bool:
    """Return whether the sidecar at an address serves."""
    with grpc.insecure_channel(address) as channel, suppress(grpc.RpcError):
        check = health_pb2_grpc.HealthStub(channel).Check
        answer = check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
        return answer.status == health_pb2.HealthCheckResponse.SERVING
    return False


def is_healthy(port: int) -> bool:
    """Return whether the engine at a port serves."""
    with suppress(OSError, HTTPException), urlopen(f"http://{HOST}:{port}/health", timeout=PROBE_TIMEOUT_S) as answer:
        return answer.status == 200
    return False


def accepts(port: int) -> bool:
    """Return whether a port accepts connections."""
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
