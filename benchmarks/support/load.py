"""Load for a sidecar and for an index: reproducible text, an engine without a model, and text at a constant rate."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import numpy as np

import ssd.replay
from drafter_service.client import DrafterClient
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
from drafter_service.transport.wire import MESSAGE_SIZES, pack
from ssd.replay import RecordedRequest, Recording
from ssd.types import offsets_of

VOCABULARY = 50_000
PHRASES, LONGEST_PHRASE, SHORTEST_PHRASE = 100_000, 24, 3
CHANGED = 1 / 12
REQUEST_TOKENS = 250
AT_ONCE = 2_000
"""Requests that `Writer` makes at once, and number of different requests of a `SimulatedEngine`."""
PROMPT = 64
"""Prompt tokens of a simulated engine's requests, which have `REQUEST_TOKENS` tokens."""
CORPUS_SEED, ENGINE_SEED, FEED_SEED = 1, 2, 3
MAX_DRAFT, COST = 8, 0.02
"""64 sequences with 8 tokens each: an engine verifies about 512 tokens in a step without additional time."""
OBSERVED_AT_ONCE, FEED_TEXTS = 2_000, 40
"""Texts in one Observe call: when a corpus is filled, and of a `Feed`."""
LONG_DEADLINE_S = 10.0
NAMESPACE = "default"


class Writer:
    """Generates text with matches of all lengths from a seed.

    A request is a sequence of phrases of 3 to 24 tokens whose frequencies follow Zipf's law; one token in twelve is
    replaced, so that repeats are frequent and short, as in real traffic.
    """

    def __init__(self, seed: int) -> None:
        self._words, self._lengths = _phrases()
        self._rng = np.random.default_rng(seed)

    def requests(self) -> Iterator[np.ndarray]:
        """Generate requests of REQUEST_TOKENS tokens, uint32."""
        while True:
            text = self._text(AT_ONCE * REQUEST_TOKENS)
            yield from text[: len(text) // REQUEST_TOKENS * REQUEST_TOKENS].reshape(-1, REQUEST_TOKENS)

    def take(self, tokens: int) -> list[np.ndarray]:
        """Return requests of about `tokens` tokens in all."""
        return [*itertools.islice(self.requests(), max(1, tokens // (REQUEST_TOKENS + 1)))]

    def _text(self, tokens: int) -> np.ndarray:
        picked = np.minimum(self._rng.zipf(1.1, 2 * tokens // (SHORTEST_PHRASE + LONGEST_PHRASE)), PHRASES) - 1
        used = np.arange(LONGEST_PHRASE) < self._lengths[picked][:, None]
        text = self._words[picked][used]
        changed = self._rng.random(len(text)) < CHANGED
        text[changed] = self._rng.integers(0, VOCABULARY, int(changed.sum()), np.uint32)
        return text


@functools.cache
def _phrases() -> tuple[np.ndarray, np.ndarray]:
    """Return the phrases of all writers, uint32 [PHRASES, LONGEST_PHRASE], and their lengths, int64 [PHRASES]."""
    rng = np.random.default_rng(0)
    # The frequencies of tokens follow Zipf's law too.
    ranks = np.minimum(rng.zipf(1.3, PHRASES * LONGEST_PHRASE), VOCABULARY).astype(np.uint32) - 1
    words = rng.permutation(VOCABULARY).astype(np.uint32)[ranks].reshape(PHRASES, LONGEST_PHRASE)
    return words, rng.integers(SHORTEST_PHRASE, LONGEST_PHRASE + 1, PHRASES)


class SimulatedEngine:
    """Runs `batch` requests with known outputs at a time; a finished one is replaced at once.

    Requests repeat after `AT_ONCE` of them.
    """

    def __init__(self, drafter: Any, batch: int, seed: int = ENGINE_SEED) -> None:
        """Start `batch` requests; drafter: an embedded drafter or a client."""
        self._drafter, self._batch = drafter, batch
        # Requests begin at different places, as if they had started one after another.
        first = np.random.default_rng(seed).integers(PROMPT, REQUEST_TOKENS - MAX_DRAFT - 1, batch)
        prompts = [*first.tolist(), *[PROMPT] * (AT_ONCE - batch)]
        texts = zip(Writer(seed).requests(), prompts, strict=False)
        self._recording = Recording.of([RecordedRequest(text[:at], text[at:]) for text, at in texts])
        self._waiting = itertools.cycle(range(AT_ONCE))
        self._counts = np.zeros((4, AT_ONCE), np.int64)
        self._step = ssd.replay.Step(self._recording, self._counts, MAX_DRAFT)
        self._start(batch)

    @property
    def steps(self) -> int:
        """Number of steps of single sequences."""
        return int(self._counts[0].sum())

    @property
    def drafted(self) -> int:
        """Number of draft tokens."""
        return int(self._counts[1].sum())

    def step(self) -> float:
        """Run a step of the batch; return the drafter's seconds."""
        progress = replace(self._step.progress(), cost=COST)
        began = time.perf_counter()
        drafts = self._drafter.draft(progress)
        seconds = time.perf_counter() - began
        self._step.verify(drafts)
        if self._step.ended.any():
            self._finish(self._step.ended)
            self._step.drop_ended()
            # Prompts run in a separate step. As with a real model, the drafter has then processed started and finished
            # requests before the next timed step.
            prompts = ssd.replay.Step(self._recording, self._counts, max_draft=1)
            for request in self._start(self._batch - len(self._step)):
                prompts.add(request)
            self._drafter.draft(replace(prompts.progress(), cost=COST))
        return seconds

    def stop(self) -> None:
        """Finish the running requests."""
        self._finish(np.ones(len(self._step), bool))

    def _start(self, count: int) -> list[int]:
        """Begin requests, and return them."""
        new = [*itertools.islice(self._waiting, count)]
        for request in new:
            self._drafter.start(request, self._recording.prompt(request))
            self._step.add(request)
        return new

    def _finish(self, rows: np.ndarray) -> None:
        for row in np.flatnonzero(rows).tolist():
            request, verified = int(self._step.requests[row]), int(self._step.drafted[row])
            self._drafter.finish(request, self._step.last(row), verified=verified, learn=False)


def client_of(address: str, **options: Any) -> DrafterClient:
    """Return a client of the namespace that is measured."""
    return DrafterClient(address, namespace=NAMESPACE, **options)


def observe(stub: DrafterServiceStub, texts: Sequence[np.ndarray], **options: Any) -> None:
    """Let a service learn texts without request names. options: of the calls."""
    for first in range(0, len(texts), OBSERVED_AT_ONCE):
        part = texts[first : first + OBSERVED_AT_ONCE]
        offsets = offsets_of(np.array([len(text) for text in part], np.uint32))
        message = pb.Texts(tokens=pack(np.concatenate(part), "u4"), offsets=pack(offsets, "u4"))
        stub.Observe(pb.ObserveRequest(namespace=NAMESPACE, texts=message), **options)


def fill(address: str, texts: Sequence[np.ndarray]) -> None:
    """Let a service learn texts, and wait until all of them are draftable."""
    with grpc.insecure_channel(address, options=MESSAGE_SIZES) as channel:
        stub = DrafterServiceStub(channel)
        observe(stub, texts, wait_for_ready=True)
        # Forgetting an unknown name waits for all.
        stub.Forget(pb.ForgetRequest(namespace=NAMESPACE, request_id="unknown"))


class Feed:
    """A thread that sends text to a service at a constant rate."""

    def __init__(self, address: str, tokens_per_s: float) -> None:
        self._address, self._tokens_per_s = address, tokens_per_s
        self._requests = Writer(FEED_SEED).requests()
        self._stopping = threading.Event()
        self.tokens = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        with grpc.insecure_channel(self._address, options=MESSAGE_SIZES) as channel:
            stub = DrafterServiceStub(channel)
            while not self._stopping.is_set():
                texts = [*itertools.islice(self._requests, FEED_TEXTS)]
                observe(stub, texts)
                self.tokens += sum(map(len, texts))
                self._stopping.wait(max(0.0, began + self.tokens / self._tokens_per_s - time.monotonic()))
