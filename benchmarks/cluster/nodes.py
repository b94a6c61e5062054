"""The processes of a cluster: Redis, and nodes of an engine and its sidecar."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.hosts.engines import HOSTS, NULL_PROPOSER
from benchmarks.support import ROOT, new_parser
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
SNAPSHOT_S = 30
START_TIMEOUT_S, STOP_TIMEOUT_S, CALL_TIMEOUT_S, PROBE_TIMEOUT_S = 300.0, 60.0, 60.0, 2.0
REDIS_PERSISTENCE = ("--save", "", "--appendonly", "yes", "--appendfsync", "everysec")


def cluster_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that choose the engines; logs are written beside `--out`."""
    parser = new_parser(name, description)
    parser.set_defaults(out=Path("build", name, f"{name}.json"))
    parser.add_argument("--engine", choices=("ssd", "vllm"), help="default: vllm if --hosts exists, else ssd")
    parser.add_argument("--hosts", type=Path, default=HOSTS, help=f"virtual environment with vLLM ({HOSTS})")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Choose the engine if none is given, and make the folder. Raises SystemExit if something is not installed."""
    python = options.hosts / "bin" / "python"
    options.engine = options.engine or ("vllm" if python.exists() else "ssd")
    if options.engine == "vllm" and not python.exists():
        raise SystemExit(f"there is no {python}; run `make hosts`, or choose --engine ssd")
    if shutil.which("redis-server") is None:
        raise SystemExit("redis-server is not installed; run: apt-get install redis-server")
    (options.out.parent / "logs").mkdir(parents=True, exist_ok=True)


class Usage(NamedTuple):
    """Resources of a process and all its children."""

    cpu_s: float
    """Processor time, including that of earlier runs that were killed or stopped."""
    memory_bytes: int
    """Proportional set size: pages that processes share count once."""
    threads: int
    descriptors: int


@dataclass
class ManagedProcess:
    """A command that runs in a process group of its own, with its output in a file."""

    name: str
    command: Sequence[str]
    log: Path
    is_ready: Callable[[], bool]
    environment: dict[str, str] = field(default_factory=dict)
    """Variables besides the current ones."""
    process: psutil.Popen | None = None
    _past_cpu_s: float = 0.0

    def start(self) -> None:
        """Start the process without waiting until it is ready."""
        with self.log.open("ab") as output:
            self.process = psutil.Popen(
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
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{self.name} did not start; see {self.log}")
            time.sleep(0.1)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the process a signal, and after a while kill what is left of it and its children."""
        if (process := self.process) is None:
            return
        self._past_cpu_s = self.usage().cpu_s
        if process.poll() is None:
            process.send_signal(number)
        with suppress(psutil.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.process = None

    def restart(self, pause_s: float) -> None:
        """Kill the process, as the kernel does when memory runs out, and start it again after a pause."""
        self.end(signal.SIGKILL)
        time.sleep(pause_s)
        self.start()
        self.await_ready()

    def usage(self) -> Usage:
        """Return the resources that the process and its children use now."""
        used = [Usage(self._past_cpu_s, 0, 0, 0)]
        # A process may end while it is read.
        with suppress(psutil.NoSuchProcess):
            for each in [] if self.process is None else [self.process, *self.process.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    # Of the process, and of its children that have ended.
                    cpu_s = sum(each.cpu_times()[:4])
                    used.append(Usage(cpu_s, each.memory_full_info().pss, each.num_threads(), each.num_fds()))
        return Usage(*map(sum, zip(*used, strict=True)))


class Node:
    """An engine and its sidecar."""

    def __init__(
        self, name: str, folder: Path, redis_port: int, options: argparse.Namespace, sidecar_arguments: Sequence[str]
    ) -> None:
        folder.mkdir()
        self.name, self.address = name, f"unix:{folder}/drafter.sock"
        self.port, self.metrics = free_port(), f"{HOST}:{free_port()}"
        """Port of the engine, and address of the sidecar's metrics."""
        command = [sys.executable, "-m", "drafter_service.commands.main", "serve", "--log-level", "warning"]
        command += ["--listen", self.address, "--metrics", self.metrics, "--log", f"redis://{HOST}:{redis_port}"]
        command += ["--snapshot-folder", str(folder / "snapshots"), "--set", f"snapshots.interval_s={SNAPSHOT_S}"]
        logs = options.out.parent / "logs"
        self.sidecar = ManagedProcess(
            f"sidecar {name}",
            [*command, *sidecar_arguments],
            logs / f"sidecar-{name}.log",
            lambda: is_serving(self.address),
            {**PYTHON_PATH},
        )
        command, environment = engine_command(options, self.port, self.address)
        self.engine = ManagedProcess(
            f"engine {name}", command, logs / f"engine-{name}.log", lambda: is_healthy(self.port), environment
        )

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


class Cluster(NamedTuple):
    """All processes."""

    nodes: list[Node]
    redis: ManagedProcess
    redis_port: int
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
        redis = ManagedProcess("Redis", command, options.out.parent / "logs" / "redis.log", lambda: accepts(port))
        nodes = [Node(name, folder / name, port, options, sidecar_arguments) for name in "ab"[:count]]
        # Engines start together, which takes them longest.
        for processes in ([redis], *([node.sidecar] for node in nodes), [node.engine for node in nodes]):
            for process in processes:
                stack.callback(process.end)
                process.start()
            for process in processes:
                process.await_ready()
        yield Cluster(nodes, redis, port, folder)


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
