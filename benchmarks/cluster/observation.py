"""What a long run uses over time: samples of all processes and files, and a comparison of its start and its end."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cluster.processes import Usage
from benchmarks.cluster.topology import Cluster
from benchmarks.cluster.traffic import Record
from benchmarks.support.targets import at_most
from drafter_service.observability.measuring.results import machine

PARTS = 6
"""The first part of the run is the warm-up; the second part is compared with the last one."""
MAX_GROWTH = 0.02
MAX_SLOWER = 0.10
BUCKETS = 60
"""Points of each curve of the document."""
BYTES_PER_MB = 1e6

Document = dict[str, Any]


class Sample(NamedTuple):
    """The resources at one time."""

    time: float
    """On the monotonic clock."""
    usages: dict[str, Usage]
    """By name of the process."""
    files: int
    """Files in the folders of the cluster."""


class Observations:
    """Samples of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.samples: list[Sample] = []

    def sample(self) -> None:
        """Add the resources that are used now."""
        usages = {process.name: process.usage() for process in self._cluster.processes}
        files = sum(len(names) for _, _, names in os.walk(self._cluster.folder))
        self.samples.append(Sample(time.monotonic(), usages, files))

    def document(
        self, engine: str, began: float, ended: float, records: Sequence[Record], errors: Sequence[str]
    ) -> Document:
        """Return the figures of the run between two times."""
        samples = [sample for sample in self.samples if began <= sample.time <= ended]
        part = (ended - began) / PARTS
        first, last = (began + part, began + 2 * part), (ended - part, ended)
        processes = [
            compare_process(name, within(samples, *first), within(samples, *last)) for name in samples[0].usages
        ]
        files = [min(sample.files for sample in within(samples, *period)) for period in (first, last)]
        latencies = [
            [record.seconds for record in records if start <= record.due < end] for start, end in (first, last)
        ]
        p99 = [round(float(np.percentile(seconds, 99)) * 1000, 1) for seconds in latencies]
        p50 = [round(float(np.percentile(seconds, 50)) * 1000, 1) for seconds in latencies]
        document: Document = {
            **machine(),
            "engine": engine,
            "seconds": round(ended - began),
            "requests": len(records),
            "errors": list(errors[:20]),
            "error_count": len(errors),
            "part_s": round(part),
            "latency_ms": {"p50": p50, "p99": p99},
            "files": files,
            "processes": processes,
            "curves": curves(samples, records, began, ended),
        }
        document["targets"] = targets(document)
        return document


def within(samples: Sequence[Sample], start: float, end: float) -> list[Sample]:
    """Return the samples of a period."""
    return [sample for sample in samples if start <= sample.time <= end]


def compare_process(name: str, first: Sequence[Sample], last: Sequence[Sample]) -> Document:
    """Return the resources of a process in two periods, as pairs."""
    pairs = [[sample.usages[name] for sample in samples] for samples in (first, last)]
    memory = [float(np.mean([usage.memory_bytes for usage in usages])) for usages in pairs]
    cores = [
        (usages[-1].cpu_s - usages[0].cpu_s) / (samples[-1].time - samples[0].time)
        for usages, samples in zip(pairs, (first, last), strict=True)
    ]
    return {
        "name": name,
        "memory_mb": [round(value / BYTES_PER_MB, 2) for value in memory],
        "growth": round(memory[1] / memory[0] - 1, 4),
        # The least number, since some are in use for a moment only.
        "threads": [min(usage.threads for usage in usages) for usages in pairs],
        "descriptors": [min(usage.descriptors for usage in usages) for usages in pairs],
        "cores": [round(value, 3) for value in cores],
    }


def curves(samples: Sequence[Sample], records: Sequence[Record], began: float, ended: float) -> Document:
    """Return memory by process, and latency, over time, as means and 99th percentiles of equal periods."""
    edges = np.linspace(began, ended, BUCKETS + 1)
    sample_at = np.digitize([sample.time for sample in samples], edges) - 1
    record_at = np.digitize([record.due for record in records], edges) - 1
    seconds = np.array([record.seconds for record in records])
    memory = {
        name: np.array([sample.usages[name].memory_bytes for sample in samples]) / BYTES_PER_MB
        for name in samples[0].usages
    }
    return {
        "seconds": [round(float(edge - began), 1) for edge in edges[1:]],
        "memory_mb": {
            name: [_rounded(np.mean, values[sample_at == at]) for at in range(BUCKETS)]
            for name, values in memory.items()
        },
        "latency_p99_ms": [
            _rounded(lambda values: np.percentile(values, 99), seconds[record_at == at] * 1000) for at in range(BUCKETS)
        ],
    }


def _rounded(function: Any, values: np.ndarray) -> float | None:
    return round(float(function(values)), 2) if len(values) else None


def targets(document: Document) -> list[Document]:
    """Return the targets, and whether the run has reached them."""
    processes = document["processes"]
    p99 = document["latency_ms"]["p99"]
    rows: list[tuple[str, float, float]] = [("errors", document["error_count"], 0.0)]
    rows += [(f"memory of {each['name']}, growth", each["growth"], MAX_GROWTH) for each in processes]
    for kind in ("threads", "descriptors"):
        rows.append((f"{kind} left over", sum(max(0, each[kind][1] - each[kind][0]) for each in processes), 0.0))
    rows.append(("files left over", max(0, document["files"][1] - document["files"][0]), 0.0))
    rows.append(("latency, p99, growth", round(p99[1] / p99[0] - 1, 4), MAX_SLOWER))
    return [at_most(most).row(name, value) for name, value, most in rows]
