"""An engine without a model: it runs requests with known outputs, and verifies drafts against these."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any

import numpy as np

import ssd.replay
from benchmarks.support.text import AT_ONCE, REQUEST_TOKENS, Writer
from ssd.replay import RecordedRequest, Recording

PROMPT = 64
"""Number of prompt tokens of a request, which has REQUEST_TOKENS tokens."""


class SimulatedEngine:
    """Runs `batch` requests at a time; a finished one is replaced at once. Requests repeat after `AT_ONCE` of them."""

    def __init__(self, drafter: Any, seed: int, batch: int, *, max_draft: int, cost: float, learn: bool) -> None:
        """Start `batch` requests; drafter: an embedded drafter or a client."""
        self._drafter, self._batch, self._cost, self._learn = drafter, batch, cost, learn
        # Requests begin at different places, as if they had started one after another.
        first = np.random.default_rng(seed).integers(PROMPT, REQUEST_TOKENS - max_draft - 1, batch)
        prompts = [*first.tolist(), *[PROMPT] * (AT_ONCE - batch)]
        texts = zip(Writer(seed).requests(), prompts, strict=False)
        self._recording = Recording.of([RecordedRequest(text[:at], text[at:]) for text, at in texts])
        self._waiting = itertools.cycle(range(AT_ONCE))
        self._counts = np.zeros((4, AT_ONCE), np.int64)
        self._step = ssd.replay.Step(self._recording, self._counts, max_draft)
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
        progress = replace(self._step.progress(), cost=self._cost)
        began = time.perf_counter()
        drafts = self._drafter.draft(progress)
        seconds = time.perf_counter() - began
        self._step.verify(drafts)
        if self._step.ended.any():
            self._finish(self._step.ended, learn=self._learn)
            self._step.drop_ended()
            # Prompts run in a separate step. As with a real model, the drafter has then processed started and finished
            # requests before the next timed step.
            prompts = ssd.replay.Step(self._recording, self._counts, max_draft=1)
            for request in self._start(self._batch - len(self._step)):
                prompts.add(request)
            self._drafter.draft(replace(prompts.progress(), cost=self._cost))
        return seconds

    def stop(self) -> None:
        """Finish the running requests."""
        self._finish(np.ones(len(self._step), bool), learn=False)

    def _start(self, count: int) -> list[int]:
        """Begin requests, and return them."""
        new = [*itertools.islice(self._waiting, count)]
        for request in new:
            self._drafter.start(request, self._recording.prompt(request))
            self._step.add(request)
        return new

    def _finish(self, rows: np.ndarray, *, learn: bool) -> None:
        for row in np.flatnonzero(rows).tolist():
            request, verified = int(self._step.requests[row]), int(self._step.drafted[row])
            self._drafter.finish(request, self._step.last(row), verified=verified, learn=learn)
