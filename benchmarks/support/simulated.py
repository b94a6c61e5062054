"""An engine without a model: it runs requests with known outputs, and verifies drafts against these."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.support.text import REQUEST_TOKENS, Writer
from ssd.types import DraftBatch, Progress, offsets_of

PROMPT = 64
"""Number of prompt tokens of a request, which has REQUEST_TOKENS tokens."""


class SimulatedEngine:
    """Runs `batch` requests at a time; a finished one is replaced at once."""

    def __init__(self, drafter: Any, seed: int, batch: int, *, max_draft: int, cost: float, learn: bool) -> None:
        """Start `batch` requests; drafter: an embedded drafter or a client."""
        self._drafter, self._batch, self._learn = drafter, batch, learn
        self._cost = cost
        self._requests: Iterator[np.ndarray] = Writer(seed).requests()
        self._limits = np.full(batch, max_draft, np.uint32)
        self._ids = np.arange(batch, dtype=np.uint64)
        self._texts = [next(self._requests) for _ in range(batch)]
        # Requests begin at different places, as if they had started one after another.
        first = np.random.default_rng(seed).integers(PROMPT, REQUEST_TOKENS - max_draft - 1, batch)
        self._done = first.tolist()
        self._committed = [0] * batch
        self._verified = np.zeros(batch, np.uint32)
        self.steps, self.tokens, self.drafted, self.calls = 0, 0, 0, 0
        for index in range(batch):
            drafter.start(index, self._texts[index][: self._done[index]])

    def step(self) -> float:
        """Run a step of the batch; return the drafter's seconds."""
        progress = self._progress()
        began = time.perf_counter()
        drafts = self._drafter.draft(progress)
        seconds = time.perf_counter() - began
        self.calls += 1
        self._verify(drafts)
        self._replace_ended()
        return seconds

    def stop(self) -> None:
        """Finish the running requests."""
        for index in range(self._batch):
            self._finish(index, learn=False)

    def _progress(self) -> Progress:
        runs = [
            text[done - count : done]
            for text, done, count in zip(self._texts, self._done, self._committed, strict=True)
        ]
        return Progress(
            self._ids.copy(),
            np.concatenate(runs),
            offsets_of(np.array(self._committed, np.uint32)),
            self._verified.copy(),
            self._limits,
            self._cost,
        )

    def _verify(self, drafts: DraftBatch) -> None:
        offsets, tokens = drafts.offsets.tolist(), drafts.tokens.tolist()
        for index in range(self._batch):
            draft = tokens[offsets[index] : offsets[index + 1]]
            done = self._done[index]
            truth = self._texts[index][done : done + len(draft)].tolist()
            accepted = next(
                (at for at, token in enumerate(draft) if at >= len(truth) or token != truth[at]), len(draft)
            )
            self._committed[index] = accepted + 1
            self._done[index] = done + accepted + 1
            self._verified[index] = len(draft)
            self.drafted += len(draft)
            self.tokens += accepted + 1
        self.steps += self._batch

    def _replace_ended(self) -> None:
        """Replace finished requests by new ones, whose prompts run in a separate step.

        As with a real model, the drafter has then processed started and finished requests before the next timed step.
        """
        new = []
        for index in range(self._batch):
            if self._done[index] + int(self._limits[index]) + 1 >= REQUEST_TOKENS:
                self._finish(index, learn=self._learn)
                self._ids[index] += self._batch
                self._texts[index], self._done[index], self._committed[index] = next(self._requests), PROMPT, 0
                self._verified[index] = 0
                self._drafter.start(int(self._ids[index]), self._texts[index][:PROMPT])
                new.append(index)
        if new:
            none = np.zeros(len(new), np.uint32)
            nothing = np.zeros(len(new) + 1, np.uint32)
            self.calls += 1
            self._drafter.draft(Progress(self._ids[new], none[:0], nothing, none, none + 1, self._cost))

    def _finish(self, index: int, *, learn: bool) -> None:
        done, count = self._done[index], self._committed[index]
        self._drafter.finish(
            int(self._ids[index]),
            self._texts[index][done - count : done],
            verified=int(self._verified[index]),
            learn=learn,
        )
