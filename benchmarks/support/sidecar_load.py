"""Load of a sidecar: clients, simulated engines, and text that it learns."""

from __future__ import annotations

import threading
import time
from typing import Any

import grpc
import numpy as np

from benchmarks.support.simulated import SimulatedEngine
from benchmarks.support.text import Writer
from drafter_service.client import DrafterClient
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
from drafter_service.transport.wire import MESSAGE_SIZES, pack
from ssd.types import offsets_of

CORPUS_SEED, ENGINE_SEED, FEED_SEED = 1, 2, 3
MAX_DRAFT, COST = 8, 0.02
"""64 sequences with 8 tokens each: an engine verifies about 512 tokens in a step without additional time."""
FEED_TEXTS = 40
"""Texts in one Observe call: 10,000 tokens."""
LONG_DEADLINE_S = 10.0
NAMESPACE = "default"


def texts_message(texts: list[np.ndarray]) -> pb.Texts:
    """Return texts without request names as a message."""
    offsets = offsets_of(np.array([len(text) for text in texts], np.uint32))
    return pb.Texts(tokens=pack(np.concatenate(texts), "u4"), offsets=pack(offsets, "u4"))


def fill(address: str, tokens: int) -> None:
    """Send `tokens` tokens of text to the service, and wait until all of them are draftable."""
    texts = Writer(CORPUS_SEED).take(tokens)
    with grpc.insecure_channel(address, options=MESSAGE_SIZES) as channel:
        stub = DrafterServiceStub(channel)
        for first in range(0, len(texts), 2000):
            message = texts_message(texts[first : first + 2000])
            stub.Observe(pb.ObserveRequest(namespace=NAMESPACE, texts=message), wait_for_ready=True)
        # Forgetting an unknown name waits for all.
        stub.Forget(pb.ForgetRequest(namespace=NAMESPACE, request_id="unknown"))


def client_of(address: str, **options: Any) -> DrafterClient:
    """Return a client of the namespace that is measured."""
    return DrafterClient(address, namespace=NAMESPACE, **options)


def engine_on(drafter: Any, batch: int, seed: int = ENGINE_SEED, *, learn: bool = False) -> SimulatedEngine:
    """Return a simulated engine with the settings of all measurements."""
    return SimulatedEngine(drafter, seed, batch, max_draft=MAX_DRAFT, cost=COST, learn=learn)


class Feed:
    """A thread that sends text to the service at a constant rate."""

    def __init__(self, address: str, tokens_per_s: float, seed: int = FEED_SEED) -> None:
        self._channel = grpc.insecure_channel(address, options=MESSAGE_SIZES)
        self._stub = DrafterServiceStub(self._channel)
        self._texts = Writer(seed).requests()
        self._tokens_per_s = tokens_per_s
        self._stopping = threading.Event()
        self.tokens = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._channel.close()

    def _run(self) -> None:
        began = time.monotonic()
        while not self._stopping.is_set():
            texts = [next(self._texts) for _ in range(FEED_TEXTS)]
            self._stub.Observe(pb.ObserveRequest(namespace=NAMESPACE, texts=texts_message(texts)))
            self.tokens += sum(map(len, texts))
            self._stopping.wait(max(0.0, began + self.tokens / self._tokens_per_s - time.monotonic()))
