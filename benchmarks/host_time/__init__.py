"""The time of a step on the host.

What cases of all engines share: requests, the clock of the device, and figures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

MAX_DRAFT = 16
MAX_POSITIONS = 8192
PROMPT_TOKENS, OUTPUT_TOKENS = 5000, 128
MAX_TOKEN_ID = 1 << 18
SHIFT, VARIANTS = 1009, 8
"""Number of versions of each request that is served, so that none repeats an earlier one, and difference of token ids
from one to the next.
"""
LEARNED = 400
"""Number of requests that the drafter has learned before."""
STAGES = ("schedule", "draft", "forward", "verify", "commit")


def step_tokens(at_once: int) -> int:
    """Return the largest number of tokens in a step with a number of requests at once."""
    return at_once * (1 + MAX_DRAFT) + 4096


def recorded_items(path: Path) -> tuple[list[Any], list[Any], int]:
    """Return the requests that a drafter has learned, those that are served, and the size of their vocabulary.

    Requests are `benchmarks.gpu.requests.Item`. After all recorded ones, each is served again with other tokens: token
    ids are shifted.
    """
    from benchmarks.gpu.requests import Item, replay_items
    from ssd.replay import Recording

    trace = Recording.load(path)
    short = trace.take(np.flatnonzero(trace.prompt_lengths <= PROMPT_TOKENS))
    items, _ = replay_items(short, PROMPT_TOKENS, OUTPUT_TOKENS, MAX_TOKEN_ID)
    vocabulary = 1 + max(int(part.max()) for item in items for part in (item.request.prompt, item.request.recorded))
    learned = min(LEARNED, len(items) // 2)

    def shifted(item: Item, by: int) -> Item:
        parts = {name: getattr(item.request, name) for name in ("prompt", "recorded")}
        parts = {name: (part + np.uint32(by)) % np.uint32(vocabulary) for name, part in parts.items()}
        return item._replace(request=replace(item.request, **parts))

    served = [shifted(item, SHIFT * number) for number in range(VARIANTS) for item in items[learned:]]
    return items[:learned], served, vocabulary


class Device:
    """A device that answers at once. Counts its own time, and that during which a GPU would have waited."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Time taken to stand in for the device, which is not the engine's."""
        self.critical: list[float] = []
        """Seconds from the results of a step to the launch of the next one, where none was in flight."""
        self._in_flight = 0
        self._read_at: float | None = None

    @contextmanager
    def work(self, *, is_step: bool) -> Iterator[None]:
        """Measure a launch; is_step: whether its results are read."""
        began = time.perf_counter()
        if self._read_at is not None:
            self.critical.append(began - self._read_at)
            self._read_at = None
        self._in_flight += is_step
        yield
        self.seconds += time.perf_counter() - began

    def read(self) -> None:
        """Note that the results of the oldest step have been read."""
        self._in_flight -= 1
        self._read_at = None if self._in_flight else time.perf_counter()


class Steps:
    """Durations of an engine's steps in seconds, without those of the device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.total: list[float] = []
        self._stages: list[list[float]] = []
        self._committed = self._produced = 0

    def __len__(self) -> int:
        return len(self.total)

    def add(self, total: float, stages: list[float], committed: int, produced: int) -> None:
        """Add a step: its seconds, those of `STAGES`, and the tokens and the number of sequences that it produced."""
        self.total.append(total)
        self._stages.append(stages)
        self._committed += committed
        self._produced += produced

    def figures(self, first: int, *, has_other: bool) -> dict[str, float]:
        """Return the figures of all steps from the first one on, in milliseconds.

        has_other: whether median, p90 and mean are of whole steps, or else of the stages' sum.
        """
        total, stages = 1e3 * np.array(self.total[first:]), 1e3 * np.array(self._stages[first:])
        shown, critical = total if has_other else stages.sum(axis=1), self._device.critical
        return {
            "median": float(np.median(shown)),
            "p90": float(np.percentile(shown, 90)),
            "mean": float(shown.mean()),
            "critical": 1e3 * float(np.median(critical)) if critical else 0.0,
            **dict(zip(STAGES, np.median(stages, axis=0).tolist(), strict=True)),
            "other": float(np.median(total - stages.sum(axis=1))),
            "tokens per step": self._committed / max(1, self._produced),
        }
