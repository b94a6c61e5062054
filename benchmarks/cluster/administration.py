"""The mixed load of a sidecar besides its engine: clients that come and go, forgetting, namespaces, reports, snapshots.

It is constant and light, so that the latencies of engines can be compared over time.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.request import urlopen

import numpy as np

from benchmarks.cluster.engines import MODEL
from benchmarks.cluster.topology import Node
from benchmarks.support.sidecar_load import Feed, client_of, engine_on, texts_message
from drafter_service.client.identity import model_identity
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub

BATCH = 4
STEPS_PER_CONNECTION = 100
CONNECTION_S, ROUND_S = 2.0, 0.5
"""Seconds between two connections of a client, and between two rounds of calls."""
LEARNED_PER_S = 2_000
ERROR_PAUSE_S = 1.0
FILL_TEXTS, FILL_TOKENS, FILL_AT_ONCE = 70_000, 8, 1_000
"""Texts that fill a namespace and their tokens. Sidecars keep the names of the last 65,536 texts of the log."""


def fill(node: Node, namespace: str) -> None:
    """Let the sidecar of a node learn and publish texts until everything that grows with them has its final size."""
    random, vocabulary = np.random.default_rng(0), model_identity(MODEL).vocab_size
    with node.stub() as stub:
        for _ in range(0, FILL_TEXTS, FILL_AT_ONCE):
            texts = random.integers(0, vocabulary, (FILL_AT_ONCE, FILL_TOKENS)).astype(np.uint32)
            stub.Observe(pb.ObserveRequest(namespace=namespace, texts=texts_message(list(texts))))


class Load:
    """Functions that are repeated until `stop`, each in its own thread; their errors are collected."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def repeat(self, work: Callable[[], object], pause_s: float) -> None:
        """Repeat `work` in a new thread, with pauses."""

        def run() -> None:
            while not self._stopping.wait(pause_s):
                try:
                    work()
                except Exception as problem:
                    self.errors.append(f"{type(problem).__name__}: {problem}")
                    self._stopping.wait(ERROR_PAUSE_S)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def stop(self) -> None:
        """Stop all threads and wait for them."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def administered(node: Node) -> Iterator[Load]:
    """Run the load on the sidecar of a node; yield it, with its errors."""
    load, seeds, rounds = Load(), itertools.count(1), itertools.count(1)
    with node.stub() as stub, Feed(node.address, LEARNED_PER_S):
        load.repeat(lambda: run_client(node.address, seeds), CONNECTION_S)
        load.repeat(lambda: call_everything(stub, node.metrics, rounds), ROUND_S)
        try:
            yield load
        finally:
            load.stop()


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
