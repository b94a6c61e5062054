"""Run the cluster under constant mixed load for a long time: `python -m benchmarks.soak [--minutes 60]`.

Two engines, two sidecars and Redis serve requests at a fixed rate, well below what the machine can do. Meanwhile
clients come and go at both sidecars; texts are observed and forgotten; namespaces are created, saved and dropped;
reports and metrics are read. The corpora and the log in Redis are small and full from the start. Warm-up and comparison
need some minutes each, so a run of less than half an hour says little.

The first sixth of the run is a warm-up. The second sixth is compared with the last one: memory must not grow by more
than 2 %, no thread, descriptor or file may be left over, and the 99th percentile of request latency may rise by 10 % at
most. The results are written to --out, and are the last line of the output. The exit code is 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from urllib.request import urlopen

import numpy as np

from benchmarks.cluster.nodes import (
    Cluster,
    Node,
    Usage,
    check_options,
    cluster_parser,
    in_background,
    running_cluster,
)
from benchmarks.cluster.texts import namespace_name
from benchmarks.cluster.traffic import Record, Traffic, mixed_prompts
from benchmarks.support import report, say, target
from benchmarks.support.load import NAMESPACE, Feed, SimulatedEngine, client_of, observe
from drafter_service.client.identity import model_identity
from drafter_service.observability.measuring.results import machine
from drafter_service.observability.pages.tables import markdown_table
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
from drafter_service.transport.wire import pack
from engine.models.shipped import SHIPPED_MODEL

SMALL = ("--capacity", "200k", "--set", "log.max_tokens=400000")
"""Arguments of sidecars, with which the ring buffers are full after seconds."""
RATE = 3.0
"""Requests per second: with everything else, about a third of two cores."""
SAMPLE_S = 5.0
MIN_MINUTES = 2.0
"""Shortest run of which each sixth has several samples."""
FILL_TEXTS, FILL_TOKENS = 70_000, 8
"""Texts that fill a namespace and their tokens. Sidecars keep the names of the last 65,536 texts of the log."""
BATCH, STEPS_PER_CONNECTION = 4, 100
CONNECTION_S, ROUND_S = 2.0, 0.5
"""Seconds between two connections of a client, and between two rounds of calls."""
LEARNED_PER_S = 2_000
ERROR_PAUSE_S = 1.0
PARTS = 6
"""The first part of the run is the warm-up; the second part is compared with the last one."""
MAX_GROWTH, MAX_SLOWER = 0.02, 0.10


def main() -> None:
    """Run the load and print the results."""
    parser = cluster_parser("soak", __doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help=f"{MIN_MINUTES:g} at least (60)")
    options = parser.parse_args()
    if options.minutes < MIN_MINUTES:
        parser.error(f"--minutes must be at least {MIN_MINUTES:g}")
    check_options(options)
    document = {**machine(), "engine": options.engine, **soak(options)}
    rows = document["processes"]
    print(markdown_table([*rows[0]], [[str(value) for value in row.values()] for row in rows]))
    report(document, options.out)


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Run the load; return the figures and the targets."""
    seconds, samples, errors = options.minutes * 60, list[Sample](), list[str]()
    with running_cluster(2, options, *SMALL) as cluster, ExitStack() as stack:
        for node, namespace in itertools.product(cluster.nodes, (NAMESPACE, namespace_name())):
            fill(node, namespace)
        traffic = Traffic(cluster.engine_ports, RATE)
        stack.enter_context(in_background(partial(traffic.run, itertools.cycle(mixed_prompts()))))
        for node in cluster.nodes:
            stack.enter_context(administered(node, errors))
        began = time.monotonic()
        while (passed := time.monotonic() - began) < seconds:
            time.sleep(SAMPLE_S)
            samples.append(sample(cluster))
            if len(samples) % 12 == 0:
                found = f"{len(traffic.records)} requests, {len(traffic.failures) + len(errors)} errors"
                say(f"{passed:.0f} of {seconds:.0f} s: {found}")
        ended = time.monotonic()
    return figures(samples, traffic.records, began, ended, traffic.failures + errors)


# --- The load of a sidecar besides its engine. It is constant and light, so that latencies can be compared over time.


def fill(node: Node, namespace: str) -> None:
    """Let the sidecar of a node learn and publish texts until everything that grows with them has its final size."""
    random, vocabulary = np.random.default_rng(0), model_identity(SHIPPED_MODEL).vocab_size
    with node.stub() as stub:
        observe(stub, namespace, random.integers(0, vocabulary, (FILL_TEXTS, FILL_TOKENS)).astype(np.uint32))


@contextmanager
def administered(node: Node, errors: list[str]) -> Iterator[None]:
    """Run the load on the sidecar of a node, and collect its errors."""
    works = (
        (lambda number: run_client(node.address, number), CONNECTION_S),
        (lambda number: call_everything(stub, node.metrics, number), ROUND_S),
    )
    with node.stub() as stub, Feed(node.address, LEARNED_PER_S), ExitStack() as stack:
        for work, pause_s in works:
            stack.enter_context(in_background(partial(repeat, work, pause_s, errors)))
        yield


def repeat(work: Callable[[int], object], pause_s: float, errors: list[str], stopping: threading.Event) -> None:
    """Call `work` with 1, 2, 3 and so on, with pauses, until `stopping` is set."""
    for number in itertools.count(1):
        if stopping.wait(pause_s):
            return
        try:
            work(number)
        except Exception as problem:
            errors.append(f"{type(problem).__name__}: {problem}")
            stopping.wait(ERROR_PAUSE_S)


def run_client(address: str, number: int) -> None:
    """Connect, run a batch for some steps, and disconnect, with or without finishing the sequences."""
    client = client_of(address, deadline_s=0.01)
    engine = SimulatedEngine(client, BATCH, number, learn=True)
    for _ in range(STEPS_PER_CONNECTION):
        engine.step()
    if number % 3 == 0:
        engine.stop()
    client.close()  # Otherwise the sequences are still running.


def call_everything(stub: DrafterServiceStub, metrics: str, number: int) -> None:
    """Make one call of each kind to the service."""
    name, request = f"temporary-{number % 4}", f"request-{number}"
    tokens = pack(np.arange(number % 1000, number % 1000 + 200), "u4")
    texts = pb.Texts(tokens=tokens, offsets=pack(np.array([0, 200]), "u4"), request_ids=[request])
    stub.Observe(pb.ObserveRequest(namespace=name, texts=texts))
    stub.Forget(pb.ForgetRequest(namespace=name, request_id=request))
    stub.Report(pb.ReportRequest())
    stub.ListNamespaces(pb.ListNamespacesRequest())
    with urlopen(f"http://{metrics}/metrics") as answer:
        answer.read()
    if number % 20 == 0:
        stub.Snapshot(pb.SnapshotRequest())
    if number % 7 == 0:
        stub.DropNamespace(pb.DropNamespaceRequest(namespace=name))


# --- What is used over time


class Sample(NamedTuple):
    """The resources at one time."""

    time: float
    """On the monotonic clock."""
    usages: dict[str, Usage]
    """By name of the process."""
    files: int
    """Files in the folders of the cluster."""


def sample(cluster: Cluster) -> Sample:
    """Return the resources that are used now."""
    usages = {process.name: process.usage() for process in cluster.processes}
    files = sum(len(names) for _, _, names in os.walk(cluster.folder))
    return Sample(time.monotonic(), usages, files)


def figures(
    samples: Sequence[Sample], records: Sequence[Record], began: float, ended: float, errors: Sequence[str]
) -> dict[str, Any]:
    """Return the figures of the run between two times, as pairs of the second and the last part, and the targets."""
    part = (ended - began) / PARTS
    periods = (began + part, began + 2 * part), (ended - part, ended)
    chosen = [[each for each in samples if start <= each.time <= end] for start, end in periods]
    latencies = [[1e3 * each.seconds for each in records if start <= each.due < end] for start, end in periods]
    p50, p99 = ([round(float(np.percentile(times, percent)), 1) for times in latencies] for percent in (50, 99))
    processes = [process_figures(name, chosen) for name in samples[0].usages]
    files = [min(each.files for each in period) for period in chosen]
    limits = [("errors", len(errors), 0.0), ("files left over", max(0, files[1] - files[0]), 0.0)]
    limits += [(f"memory of {each['process']}, growth", each["growth"], MAX_GROWTH) for each in processes]
    for kind in ("threads", "descriptors"):
        limits.append((f"{kind} left over", sum(max(0, each[kind][1] - each[kind][0]) for each in processes), 0.0))
    limits.append(("latency, p99, growth", round(p99[1] / p99[0] - 1, 4), MAX_SLOWER))
    return {
        "seconds": round(ended - began),
        "requests": len(records),
        "errors": [*errors[:20]],
        "latency_ms": {"p50": p50, "p99": p99},
        "files": files,
        "processes": processes,
        "targets": [target(name, value, "at most", most) for name, value, most in limits],
    }


def process_figures(name: str, periods: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """Return the resources of a process in two periods, as pairs."""
    usages = [[each.usages[name] for each in samples] for samples in periods]
    memory = [float(np.mean([usage.memory_bytes for usage in own])) for own in usages]
    seconds = [samples[-1].time - samples[0].time for samples in periods]
    return {
        "process": name,
        "memory_mb": [round(value / 1e6, 2) for value in memory],
        "growth": round(memory[1] / memory[0] - 1, 4),
        # The least number, since some are in use for a moment only.
        "threads": [min(usage.threads for usage in own) for own in usages],
        "descriptors": [min(usage.descriptors for usage in own) for own in usages],
        "cores": [round((own[-1].cpu_s - own[0].cpu_s) / s, 3) for own, s in zip(usages, seconds, strict=True)],
    }


if __name__ == "__main__":
    main()
