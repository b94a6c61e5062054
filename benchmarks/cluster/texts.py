"""Texts that a sidecar has acknowledged: how soon, and whether at all, other sidecars draft them, and at what cost.

Each text is unique: random tokens of the vocabulary. A sidecar has learned it if it drafts its end after its beginning.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import count, islice
from typing import Any, NamedTuple

import grpc
import numpy as np

from benchmarks.cluster.nodes import HOST, PROBE_TIMEOUT_S, Cluster, Node
from benchmarks.support.load import LONG_DEADLINE_S, NAMESPACE, Feed, observe
from drafter_service.client import DrafterClient
from drafter_service.client.identity import model_identity
from drafter_service.stubs import drafter_pb2 as pb
from engine.models.shipped import SHIPPED_MODEL
from ssd.types import Progress

TEXT_TOKENS, BEGINNINGS = 24, (16, 19, 22)
"""Tokens of a text, and of the beginnings after one of which the next token must be drafted. After a single one, tokens
that often follow the last token elsewhere may be more likely than one that was seen once.
"""
MAX_DRAFT = 4
INTERVAL_S = 0.25
DELAY_TIMEOUT_S = 30.0
NO_TOKENS = np.empty(0, np.uint32)
COST_TOKENS_PER_S, COST_S = 200_000, 8.0
"""Text that the first sidecar learns while the cost of replication is measured."""
CATCH_UP_S = 1.0


def unique_texts(seed: int) -> Iterator[np.ndarray]:
    """Yield texts that do not occur elsewhere, uint32 [TEXT_TOKENS]."""
    random, vocabulary = np.random.default_rng(seed), model_identity(SHIPPED_MODEL).vocab_size
    while True:
        # A token that occurs twice could be followed in the draft by what followed it before.
        yield random.choice(vocabulary, TEXT_TOKENS, replace=False).astype(np.uint32)


def namespace_name() -> str:
    """Return the name of the namespace of the cluster's engines."""
    from drafter_service.server.requests import default_namespace

    return default_namespace(model_identity(SHIPPED_MODEL))


class Reader:
    """Asks a sidecar for drafts as an engine of the cluster does."""

    def __init__(self, address: str) -> None:
        model = model_identity(SHIPPED_MODEL)
        self._client = DrafterClient(address, model=model, deadline_s=LONG_DEADLINE_S, draft_shape="tree")
        self._ids = count()
        self.close = self._client.close

    def knows(self, text: np.ndarray) -> bool:
        """Return whether the sidecar drafts the end of a text."""
        return any(text[length] in self._next_tokens(text[:length]) for length in BEGINNINGS)

    def _next_tokens(self, text: np.ndarray) -> np.ndarray:
        """Return the tokens that are drafted directly after a text."""
        sequence = next(self._ids)
        self._client.start(sequence, text, learn=False)
        draft = self._client.draft(Progress.of_one(sequence, NO_TOKENS, max_draft=MAX_DRAFT))
        self._client.finish(sequence, NO_TOKENS, learn=False)
        return draft.tokens[draft.parents < 0]

    def learn(self, text: np.ndarray) -> None:
        """Let a request with this text run and end."""
        sequence = next(self._ids)
        self._client.start(sequence, text[: BEGINNINGS[0]])
        self._client.finish(sequence, text[BEGINNINGS[0] :])


def measure_delays(nodes: Sequence[Node], probes: int) -> list[float]:
    """Return the seconds from the end of a request at the first node until the second one drafts its text."""
    delays = []
    with closing(Reader(nodes[0].address)) as first, closing(Reader(nodes[1].address)) as second:
        for text in islice(unique_texts(1), probes):
            first.learn(text)
            began = time.monotonic()
            while not second.knows(text):
                if time.monotonic() - began > DELAY_TIMEOUT_S:
                    raise SystemExit(f"the second sidecar did not draft a text of the first within {DELAY_TIMEOUT_S} s")
                time.sleep(0.001)
            delays.append(time.monotonic() - began)
            time.sleep(0.05)
    return delays


class Acknowledged(NamedTuple):
    """A text that a sidecar has acknowledged."""

    text: np.ndarray
    """uint32 [TEXT_TOKENS]."""
    node: Node
    time: float
    """Time of the acknowledgement, on the monotonic clock."""


class SentTexts:
    """Sends a unique text to the sidecars in turn, and keeps those that were acknowledged."""

    def __init__(self, nodes: Sequence[Node], seed: int) -> None:
        self._nodes, self._texts = nodes, unique_texts(seed)
        self.acknowledged: list[Acknowledged] = []
        self.refused = 0
        """Texts that were not acknowledged, because their sidecar was not there."""

    def run(self, stopping: threading.Event) -> None:
        """Send texts until `stopping` is set."""
        for number in count():
            if stopping.wait(INTERVAL_S):
                return
            node, text = self._nodes[number % len(self._nodes)], next(self._texts)
            try:
                with node.stub() as stub:
                    observe(stub, namespace_name(), [text], timeout=PROBE_TIMEOUT_S)
                self.acknowledged.append(Acknowledged(text, node, time.monotonic()))
            except grpc.RpcError:
                self.refused += 1

    def lost(self, wait_s: float, excused: Callable[[Acknowledged], bool]) -> list[tuple[str, Acknowledged]]:
        """Return the acknowledged texts that a sidecar does not draft within a time, with that sidecar's name.

        excused: whether a text need not have been kept.
        """
        missing = []
        until = time.monotonic() + wait_s
        for node in self._nodes:
            waiting = [each for each in self.acknowledged if not excused(each)]
            with closing(Reader(node.address)) as reader:
                while waiting := [each for each in waiting if not reader.knows(each.text)]:
                    if time.monotonic() > until:
                        break
                    time.sleep(INTERVAL_S)
            missing += [(node.name, each) for each in waiting]
        return missing


def measure_cost(cluster: Cluster) -> dict[str, Any]:
    """Let the first sidecar learn text that nobody drafts; return what replication costs for each token.

    Every sidecar reads the whole log, including what it has written itself.
    """
    from redis import Redis

    first, second = cluster.nodes
    redis = Redis(HOST, cluster.redis_port)
    processes = {"first sidecar": first.sidecar, "Redis": cluster.redis, "second sidecar": second.sidecar}

    def used() -> tuple[np.ndarray, np.ndarray]:
        network = redis.info("stats")
        return (
            np.array([process.usage().cpu_s for process in processes.values()]),
            np.array([network["total_net_input_bytes"], network["total_net_output_bytes"]]),
        )

    for node in cluster.nodes:
        with node.stub() as stub:
            observe(stub, NAMESPACE, [np.arange(32, dtype=np.uint32)])
    (cpu_before, bytes_before), began = used(), time.monotonic()
    with Feed(first.address, COST_TOKENS_PER_S) as feed:
        time.sleep(COST_S)
    time.sleep(CATCH_UP_S)
    seconds, (cpu, network) = time.monotonic() - began, used()
    for node in cluster.nodes:
        with node.stub() as stub:
            stub.DropNamespace(pb.DropNamespaceRequest(namespace=NAMESPACE))
    cpu_us, sent = 1e6 * (cpu - cpu_before) / feed.tokens, (network - bytes_before) / feed.tokens
    return {
        "tokens_per_s": round(feed.tokens / seconds),
        "cpu_us_per_token": dict(zip(processes, cpu_us.round(3).tolist(), strict=True)),
        "bytes_per_token": dict(zip(("to Redis", "from Redis"), sent.round(2).tolist(), strict=True)),
    }
