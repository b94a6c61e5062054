"""Run a sidecar under mixed load for a long time: `python -m benchmarks.soak [--minutes 60]`.

A real service has a small, full ring buffer. Engines in threads draft, finish, disconnect and reconnect as new clients;
texts are observed and forgotten; namespaces are created, saved and dropped; reports and metrics are read. The memory of
the service must not grow: after the warm-up, the mean of the last third of the samples is compared with that of the
first third. The last line of the output is one JSON document; the exit code is 1 after an error, or if memory grew by
more than 2 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import grpc
import numpy as np

from benchmarks.sidecar import Feed, client_of, engine_on, fill, service, texts_message
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
from drafter_service.transport.wire import MESSAGE_SIZES

CAPACITY = 1_000_000
ENGINES, BATCH = 3, 16
STEPS_PER_CONNECTION = 200
LEARNED_PER_S = 50_000
SAMPLE_S = 1.0
WARM_UP = 0.25
"""Share of the first samples, which are discarded before memory is compared."""
MAX_GROWTH = 0.02


class Load:
    """Functions that are repeated until `stop`, each in its own thread; their errors are collected."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def repeat(self, work: Callable[[], object]) -> None:
        """Repeat `work` in a new thread."""

        def run() -> None:
            while not self._stopping.is_set():
                try:
                    work()
                except Exception as problem:
                    self.errors.append(f"{type(problem).__name__}: {problem}")
                    self._stopping.wait(1.0)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def stop(self) -> None:
        """Stop all threads and wait for them."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()


def run_client(address: str, seeds: itertools.count[int]) -> None:
    """Connect, run a batch for some steps, and disconnect, with or without finishing the sequences."""
    seed = next(seeds)
    client = client_of(address, deadline_s=0.01)
    engine = engine_on(client, BATCH, seed, learn=True)
    for _ in range(STEPS_PER_CONNECTION):
        engine.step()
    if seed % 3 == 0:
        engine.stop()
    client.close()  # Otherwise the sequences are still running.


def call_everything(stub: DrafterServiceStub, metrics: str, rounds: itertools.count[int]) -> None:
    """Make one call of each kind to the service."""
    number = next(rounds)
    name = f"temporary-{number % 4}"
    text = np.arange(number % 1000, number % 1000 + 200, dtype=np.uint32)
    texts = texts_message([text])
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
    time.sleep(0.2)


def resident_bytes(stub: DrafterServiceStub) -> int:
    """Return the memory of the service as it reports it."""
    return int(json.loads(stub.Report(pb.ReportRequest()).json)["service"]["memory_bytes"])


def soak(folder: Path, seconds: float, log: Callable[[str], None]) -> dict[str, object]:
    """Run the load and return the results; `log` gets progress messages."""
    metrics = "127.0.0.1:19473"
    arguments = ("--capacity", str(CAPACITY), "--snapshot-folder", str(folder / "snapshots"), "--metrics", metrics)
    samples: list[int] = []
    load = Load()
    with service(folder, *arguments) as address, grpc.insecure_channel(address, options=MESSAGE_SIZES) as channel:
        stub = DrafterServiceStub(channel)
        fill(address, CAPACITY)
        seeds, rounds = itertools.count(1), itertools.count(1)
        for _ in range(ENGINES):
            load.repeat(lambda: run_client(address, seeds))
        load.repeat(lambda: call_everything(stub, metrics, rounds))
        began = time.monotonic()
        with Feed(address, LEARNED_PER_S):
            while (passed := time.monotonic() - began) < seconds:
                time.sleep(SAMPLE_S)
                samples.append(resident_bytes(stub))
                if len(samples) % 30 == 0:
                    log(f"{passed:.0f} of {seconds:.0f} s: {samples[-1] / 1e6:.0f} MB, {len(load.errors)} errors")
        load.stop()
    counted = samples[int(len(samples) * WARM_UP) :]
    third = max(1, len(counted) // 3)
    first, last = float(np.mean(counted[:third])), float(np.mean(counted[-third:]))
    return {
        "seconds": round(seconds),
        "connections": next(seeds) - 1,
        "errors": load.errors[:10],
        "memory_mb_first": round(first / 1e6, 1),
        "memory_mb_last": round(last / 1e6, 1),
        "memory_growth": round(last / first - 1, 4),
    }


def main() -> None:
    """Run the load and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        result = soak(Path(folder), options.minutes * 60, lambda text: print(text, file=sys.stderr, flush=True))
    print(json.dumps(result))
    growth = result["memory_growth"]
    sys.exit(bool(result["errors"]) or not isinstance(growth, float) or growth > MAX_GROWTH)


if __name__ == "__main__":
    main()
