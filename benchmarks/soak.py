"""Run the cluster under constant mixed load for a long time: `python -m benchmarks.soak [--minutes 60]`.

Two engines, two sidecars and Redis serve requests at a fixed rate, well below what the machine can do. Meanwhile
clients come and go at both sidecars; texts are observed and forgotten; namespaces are created, saved and dropped;
reports and metrics are read. The corpora and the log in Redis are small and full from the start. Warm-up and comparison
need some minutes each, so a run of less than half an hour says little.

The first sixth of the run is a warm-up. The second sixth is compared with the last one: memory must not grow by more
than 2 %, no thread, descriptor or file may be left over, and the 99th percentile of request latency may rise by 10 % at
most. The page soak.html and the document soak.json are written to --out; the document is also the last line of the
output. The exit code is 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import numpy as np

from benchmarks.cluster.nodes import Cluster, Node, Usage, add_options, check_options, in_background, running_cluster
from benchmarks.cluster.texts import namespace_name
from benchmarks.cluster.traffic import Record, Traffic, mixed_prompts
from benchmarks.support.command import new_parser
from benchmarks.support.sidecar_load import NAMESPACE, Feed, client_of, engine_on, texts_message
from benchmarks.support.targets import at_most, conclude, target_panel
from drafter_service.client.identity import model_identity
from drafter_service.observability.measuring.results import machine
from drafter_service.observability.pages import page as pages
from drafter_service.observability.pages.charts import Axis, Frame, Series, line_chart
from drafter_service.observability.pages.tables import html_table
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
from engine.models.shipped import SHIPPED_MODEL

SMALL = ("--capacity", "200k", "--set", "log.max_tokens=400000")
"""Arguments of sidecars, with which the ring buffers are full after seconds."""
RATE = 3.0
"""Requests per second: with everything else, about a third of two cores."""
SAMPLE_S = 5.0
MIN_MINUTES = 2.0
"""Shortest run of which each sixth has several samples."""
FILL_TEXTS, FILL_TOKENS, FILL_AT_ONCE = 70_000, 8, 1_000
"""Texts that fill a namespace and their tokens. Sidecars keep the names of the last 65,536 texts of the log."""
BATCH, STEPS_PER_CONNECTION = 4, 100
CONNECTION_S, ROUND_S = 2.0, 0.5
"""Seconds between two connections of a client, and between two rounds of calls."""
LEARNED_PER_S = 2_000
ERROR_PAUSE_S = 1.0
PARTS = 6
"""The first part of the run is the warm-up; the second part is compared with the last one."""
MAX_GROWTH, MAX_SLOWER = 0.02, 0.10
BUCKETS = 60
"""Points of each curve of the document."""
FRAMES = Frame(width=900, height=260, left=70, right=20, top=20), Frame()

Document = dict[str, Any]


def main() -> None:
    """Run the load and print the results."""
    parser = new_parser("soak", __doc__)
    add_options(parser, Path("build/soak"))
    parser.add_argument("--minutes", type=float, default=60.0, help=f"{MIN_MINUTES:g} at least (60)")
    options = parser.parse_args()
    if options.minutes < MIN_MINUTES:
        parser.error(f"--minutes must be at least {MIN_MINUTES:g}")
    check_options(options)
    document = soak(options)
    conclude("soak", document, render_page(document), options.out)


def soak(options: argparse.Namespace) -> Document:
    """Run the load and return the document."""
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
                print(f"{passed:.0f} of {seconds:.0f} s: {found}", file=sys.stderr, flush=True)
        ended = time.monotonic()
    errors = traffic.failures + errors
    return {
        **machine(),
        "engine": options.engine,
        "errors": errors[:20],
        "error_count": len(errors),
        **figures(samples, traffic.records, began, ended, len(errors)),
    }


# --- The load of a sidecar besides its engine. It is constant and light, so that latencies can be compared over time.


def fill(node: Node, namespace: str) -> None:
    """Let the sidecar of a node learn and publish texts until everything that grows with them has its final size."""
    random, vocabulary = np.random.default_rng(0), model_identity(SHIPPED_MODEL).vocab_size
    with node.stub() as stub:
        for _ in range(0, FILL_TEXTS, FILL_AT_ONCE):
            texts = random.integers(0, vocabulary, (FILL_AT_ONCE, FILL_TOKENS)).astype(np.uint32)
            stub.Observe(pb.ObserveRequest(namespace=namespace, texts=texts_message(list(texts))))


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
    engine = engine_on(client, BATCH, number, learn=True)
    for _ in range(STEPS_PER_CONNECTION):
        engine.step()
    if number % 3 == 0:
        engine.stop()
    client.close()  # Otherwise the sequences are still running.


def call_everything(stub: DrafterServiceStub, metrics: str, number: int) -> None:
    """Make one call of each kind to the service."""
    name = f"temporary-{number % 4}"
    texts = texts_message([np.arange(number % 1000, number % 1000 + 200, dtype=np.uint32)])
    texts.request_ids.append(f"request-{number}")
    stub.Observe(pb.ObserveRequest(namespace=name, texts=texts))
    stub.Forget(pb.ForgetRequest(namespace=name, request_id=f"request-{number}"))
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
    samples: Sequence[Sample], records: Sequence[Record], began: float, ended: float, error_count: int
) -> Document:
    """Return the figures of the run between two times, and the targets."""
    part = (ended - began) / PARTS
    periods = (began + part, began + 2 * part), (ended - part, ended)
    chosen = [[each for each in samples if start <= each.time <= end] for start, end in periods]
    latencies = [[each.seconds for each in records if start <= each.due < end] for start, end in periods]
    p50, p99 = (
        [round(float(np.percentile(seconds, percent)) * 1000, 1) for seconds in latencies] for percent in (50, 99)
    )
    processes = [compare_process(name, *chosen) for name in samples[0].usages]
    files = [min(each.files for each in period) for period in chosen]
    rows: list[tuple[str, float, float]] = [("errors", error_count, 0.0)]
    rows += [(f"memory of {each['name']}, growth", each["growth"], MAX_GROWTH) for each in processes]
    for kind in ("threads", "descriptors"):
        rows.append((f"{kind} left over", sum(max(0, each[kind][1] - each[kind][0]) for each in processes), 0.0))
    rows.append(("files left over", max(0, files[1] - files[0]), 0.0))
    rows.append(("latency, p99, growth", round(p99[1] / p99[0] - 1, 4), MAX_SLOWER))
    return {
        "seconds": round(ended - began),
        "requests": len(records),
        "part_s": round(part),
        "latency_ms": {"p50": p50, "p99": p99},
        "files": files,
        "processes": processes,
        "curves": curves(samples, records, began, ended),
        "targets": [at_most(most).row(name, value) for name, value, most in rows],
    }


def compare_process(name: str, first: Sequence[Sample], last: Sequence[Sample]) -> Document:
    """Return the resources of a process in two periods, as pairs."""
    pairs = [[each.usages[name] for each in samples] for samples in (first, last)]
    memory = [float(np.mean([usage.memory_bytes for usage in usages])) for usages in pairs]
    cores = [
        (usages[-1].cpu_s - usages[0].cpu_s) / (samples[-1].time - samples[0].time)
        for usages, samples in zip(pairs, (first, last), strict=True)
    ]
    return {
        "name": name,
        "memory_mb": [round(value / 1e6, 2) for value in memory],
        "growth": round(memory[1] / memory[0] - 1, 4),
        # The least number, since some are in use for a moment only.
        "threads": [min(usage.threads for usage in usages) for usages in pairs],
        "descriptors": [min(usage.descriptors for usage in usages) for usages in pairs],
        "cores": [round(value, 3) for value in cores],
    }


def curves(samples: Sequence[Sample], records: Sequence[Record], began: float, ended: float) -> Document:
    """Return memory by process, and latency, over time, as means and 99th percentiles of equal periods."""
    edges = np.linspace(began, ended, BUCKETS + 1)

    def by_bucket(function: Callable[[np.ndarray], Any], times: list[float], values: list[float]) -> list[float | None]:
        buckets = np.digitize(times, edges) - 1
        parts = [np.array(values)[buckets == at] for at in range(BUCKETS)]
        return [round(float(function(part)), 2) if len(part) else None for part in parts]

    times = [each.time for each in samples]
    return {
        "seconds": [round(float(edge - began), 1) for edge in edges[1:]],
        "memory_mb": {
            name: by_bucket(np.mean, times, [each.usages[name].memory_bytes / 1e6 for each in samples])
            for name in samples[0].usages
        },
        "latency_p99_ms": by_bucket(
            lambda values: np.percentile(values, 99),
            [each.due for each in records],
            [each.seconds * 1000 for each in records],
        ),
    }


# --- The page


def render_page(document: Mapping[str, Any]) -> str:
    """Return the page of a document: memory and latency over time, and what each process uses at start and end."""
    p99, over_time = document["latency_ms"]["p99"], document["curves"]
    minutes = [second / 60 for second in over_time["seconds"]]
    growth = max(each["growth"] for each in document["processes"])
    cards = [
        pages.card("requests", f"{document['requests']:,}", f"{document['error_count']} errors"),
        pages.card("largest growth of memory", f"{growth:+.1%}", "of any process, after the warm-up"),
        pages.card("latency, p99", f"{p99[1]:.0f} ms", f"{p99[0]:.0f} ms after the warm-up"),
        pages.card("files", f"{document['files'][1]}", f"{document['files'][0]} after the warm-up"),
    ]
    latency = chart(minutes, over_time["latency_p99_ms"], "latency, p99", "ms")
    panels = [pages.panel("Latency of requests, p99", "By time of the request.", latency, kind="across")]
    panels += [
        pages.panel(
            f"Memory of {name}", "Proportional set size.", chart(minutes, memory, "memory", "MB"), kind="across"
        )
        for name, memory in over_time["memory_mb"].items()
    ]
    table = process_table(document["processes"])
    panels.append(pages.panel("Processes", "After the warm-up, and at the end.", table, kind="across"))
    panels.append(target_panel(document["targets"]))
    lead = (
        f"Engines: {document['engine']}. {document['seconds'] / 60:.0f} minutes, {document['cores']} cores, "
        f"{document['date']}. The {document['part_s'] / 60:.1f} minutes after a warm-up of the same length are "
        "compared with the last ones."
    )
    main = pages.cards(cards) + pages.panels(panels)
    return pages.page("A cluster under constant load", main, "python -m benchmarks.soak", lead=lead)


def chart(minutes: Sequence[float], values: Sequence[float | None], name: str, unit: str) -> str:
    """Return a chart of values over time."""
    known = [(minute, value) for minute, value in zip(minutes, values, strict=True) if value is not None]
    return line_chart(
        f"{name} over time",
        Axis.to(minutes[-1], "minutes", is_exact=True),
        Axis.to(max(value for _, value in known) * 1.1, unit),
        [Series(name, "green", known)],
        frames=FRAMES,
    )


def process_table(processes: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of what each process uses in both periods."""
    rows = []
    for each in processes:
        memory = " / ".join(f"{value:,.1f}" for value in each["memory_mb"])
        counts = [" / ".join(map(str, each[kind])) for kind in ("threads", "descriptors")]
        cores = " / ".join(f"{value:.2f}" for value in each["cores"])
        rows.append((each["name"], memory, f"{each['growth']:+.2%}", *counts, cores))
    return html_table(("process", "memory, MB", "growth", "threads", "descriptors", "cores"), rows)


if __name__ == "__main__":
    main()
