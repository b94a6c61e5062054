"""What cases of all engines share: requests, the clock of the device, and figures."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.gpu.requests import Item, Limits, replay_items
from benchmarks.gpu.shapes import SHAPES
from ssd.replay import Recording

MAX_DRAFT = 16
MAX_POSITIONS = 8192
PROMPT_TOKENS, OUTPUT_TOKENS = 5000, 128
SHIFT = 1009
VARIANTS = 8
"""Number of versions of each request that is served, so that none repeats an earlier one."""
LEARNED = 400
"""Number of requests that the drafter has learned before."""
STAGES = ("schedule", "draft", "forward", "verify", "commit")


def step_tokens(at_once: int) -> int:
    """Return the largest number of tokens in a step with a number of requests at once."""
    return at_once * (1 + MAX_DRAFT) + 4096


def recorded_items(path: Path) -> tuple[list[Item], list[Item], int]:
    """Return the requests that a drafter has learned, those that are served, and the size of their vocabulary.

    After all recorded requests, each is served again with other tokens: token ids are shifted.
    """
    trace = Recording.load(path)
    short = trace.take(np.flatnonzero(trace.prompt_lengths <= PROMPT_TOKENS))
    items = replay_items(
        short, len(short), Limits(PROMPT_TOKENS, OUTPUT_TOKENS), replace(SHAPES["tiny"], vocab_size=1 << 18)
    )
    vocabulary = 1 + max(int(part.max()) for item in items for part in (item.request.prompt, item.request.recorded))
    learned = min(LEARNED, len(items) // 2)
    served = [shifted(item, SHIFT * number, vocabulary) for number in range(VARIANTS) for item in items[learned:]]
    return items[:learned], served, vocabulary


def shifted(item: Item, by: int, vocabulary: int) -> Item:
    """Return an item with other token ids, whose equal tokens are those that were equal before."""
    request = item.request
    parts = {name: (getattr(request, name) + np.uint32(by)) % np.uint32(vocabulary) for name in ("prompt", "recorded")}
    return replace(item, request=replace(request, **parts))


@dataclass
class Device:
    """A device that answers at once. Counts its own time, and that during which a GPU would have waited."""

    seconds: float = 0.0
    """Time taken to stand in for the device, which is not the engine's."""
    critical: list[float] = field(default_factory=list)
    """Seconds from the results of a step to the launch of the next one, where none was in flight."""
    in_flight: int = 0
    read_at: float | None = None

    @contextmanager
    def work(self, *, is_step: bool) -> Iterator[None]:
        """Measure a launch; is_step: whether its results are read."""
        began = time.perf_counter()
        if self.read_at is not None:
            self.critical.append(began - self.read_at)
            self.read_at = None
        self.in_flight += is_step
        yield
        self.seconds += time.perf_counter() - began

    def read(self) -> None:
        """Note that the results of the oldest step have been read."""
        self.in_flight -= 1
        self.read_at = None if self.in_flight else time.perf_counter()


def summary(
    total: np.ndarray, stages: np.ndarray, other: np.ndarray, critical: Sequence[float], tokens_per_step: float
) -> dict[str, float]:
    """Return the figures of measured steps in milliseconds.

    total, other: seconds [steps]. stages: seconds [steps, STAGES].
    """
    return {
        "median": 1e3 * float(np.median(total)),
        "p90": 1e3 * float(np.percentile(total, 90)),
        "mean": 1e3 * float(total.mean()),
        "critical": 1e3 * float(np.median(critical)) if critical else 0.0,
        **dict(zip(STAGES, (1e3 * np.median(stages, axis=0)).tolist(), strict=True)),
        "other": 1e3 * float(np.median(other)),
        "tokens per step": tokens_per_step,
    }
