"""Texts that a sidecar has acknowledged, and how soon, and whether at all, other sidecars draft them.

Each text is unique: random tokens of the vocabulary. A sidecar has learned it if it drafts its end after its beginning.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

import grpc
import numpy as np

from benchmarks.cluster.engines import MODEL
from benchmarks.cluster.topology import Node
from benchmarks.support.sidecar_load import LONG_DEADLINE_S, texts_message
from drafter_service.client import DrafterClient
from drafter_service.client.identity import model_identity
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
from ssd.types import Progress

TEXT_TOKENS, BEGINNINGS = 24, (16, 19, 22)
"""Tokens of a text, and of the beginnings after one of which the next token must be drafted. After a single one, tokens
that often follow the last token elsewhere may be more likely than one that was seen once.
"""
MAX_DRAFT = 4
INTERVAL_S = 0.25
CALL_TIMEOUT_S = 2.0
POLL_S = 0.001
PROBE_TIMEOUT_S = 30.0
NO_TOKENS = np.empty(0, np.uint32)


class Acknowledged(NamedTuple):
    """A text that a sidecar has acknowledged."""

    text: np.ndarray
    """uint32 [TEXT_TOKENS]."""
    node: Node
    time: float
    """Time of the acknowledgement, on the monotonic clock."""


class UniqueTexts:
    """Texts that do not occur elsewhere. One thread may use it."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._vocabulary = model_identity(MODEL).vocab_size

    def take(self) -> np.ndarray:
        """Return a text, uint32 [TEXT_TOKENS]."""
        # A token that occurs twice could be followed in the draft by what followed it before.
        return self._random.choice(self._vocabulary, TEXT_TOKENS, replace=False).astype(np.uint32)


class Reader:
    """Asks a sidecar for drafts as an engine of the cluster does."""

    def __init__(self, node: Node) -> None:
        self.client = DrafterClient(
            node.address, model=model_identity(MODEL), deadline_s=LONG_DEADLINE_S, draft_shape="tree"
        )
        self._ids = count()

    def knows(self, text: np.ndarray) -> bool:
        """Return whether the sidecar drafts the end of a text."""
        return any(text[length] in self._next_tokens(text[:length]) for length in BEGINNINGS)

    def _next_tokens(self, text: np.ndarray) -> np.ndarray:
        """Return the tokens that are drafted directly after a text."""
        sequence = next(self._ids)
        self.client.start(sequence, text, learn=False)
        draft = self.client.draft(Progress.of_one(sequence, NO_TOKENS, max_draft=MAX_DRAFT))
        self.client.finish(sequence, NO_TOKENS, learn=False)
        return draft.tokens[draft.parents < 0]

    def learn(self, text: np.ndarray) -> None:
        """Let a request with this text run and end."""
        sequence = next(self._ids)
        self.client.start(sequence, text[: BEGINNINGS[0]])
        self.client.finish(sequence, text[BEGINNINGS[0] :])

    def close(self) -> None:
        """Disconnect."""
        self.client.close()


def measure_delays(nodes: Sequence[Node], probes: int) -> list[float]:
    """Return the seconds from the end of a request at the first node until the second one drafts its text."""
    texts, delays = UniqueTexts(1), []
    first, second = Reader(nodes[0]), Reader(nodes[1])
    for _ in range(probes):
        text = texts.take()
        first.learn(text)
        began = time.monotonic()
        while not second.knows(text):
            if time.monotonic() - began > PROBE_TIMEOUT_S:
                raise SystemExit(f"the second sidecar did not draft a text of the first within {PROBE_TIMEOUT_S} s")
            time.sleep(POLL_S)
        delays.append(time.monotonic() - began)
        time.sleep(0.05)
    first.close()
    second.close()
    return delays


class SentTexts:
    """Sends a unique text to the sidecars in turn, in a thread, and keeps those that were acknowledged."""

    def __init__(self, nodes: Sequence[Node], seed: int) -> None:
        self._nodes = nodes
        self._texts = UniqueTexts(seed)
        self._stopping = threading.Event()
        self.acknowledged: list[Acknowledged] = []
        self.refused = 0
        """Texts that were not acknowledged, because their sidecar was not there."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Send texts in the background."""
        thread = threading.Thread(target=self._run, name="sent-texts")
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            thread.join()

    def lost(self, wait_s: float, excused: Callable[[Acknowledged], bool]) -> list[tuple[str, Acknowledged]]:
        """Return the acknowledged texts that a sidecar does not draft within a time, with that sidecar's name.

        excused: whether a text need not have been kept.
        """
        missing = []
        until = time.monotonic() + wait_s
        for node in self._nodes:
            reader = Reader(node)
            waiting = [each for each in self.acknowledged if not excused(each)]
            while waiting := [each for each in waiting if not reader.knows(each.text)]:
                if time.monotonic() > until:
                    break
                time.sleep(INTERVAL_S)
            missing += [(node.name, each) for each in waiting]
            reader.close()
        return missing

    def _run(self) -> None:
        for number in count():
            if self._stopping.wait(INTERVAL_S):
                return
            node, text = self._nodes[number % len(self._nodes)], self._texts.take()
            if observe(node.address, text):
                self.acknowledged.append(Acknowledged(text, node, time.monotonic()))
            else:
                self.refused += 1


def observe(address: str, text: np.ndarray, namespace: str = "") -> bool:
    """Let a sidecar learn a text; return whether it has acknowledged it."""
    with grpc.insecure_channel(address) as channel:
        try:
            DrafterServiceStub(channel).Observe(
                pb.ObserveRequest(namespace=namespace or namespace_name(), texts=texts_message([text])),
                timeout=CALL_TIMEOUT_S,
            )
        except grpc.RpcError:
            return False
    return True


def namespace_name() -> str:
    """Return the name of the namespace of the cluster's engines."""
    from drafter_service.server.requests import default_namespace

    return default_namespace(model_identity(MODEL))
