"""The shapes that steps are padded to: few enough to be captured at start, near enough to waste little."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.device.transfer import Arriving
from engine.graphs import FixedStep, Kind, Orders

LEAST_DRAFT = 4
"""Shorter drafts are padded to so many tokens: a step of 5 tokens takes as long as one of 2."""
AT_START = (Kind(draws=False, most=None), Kind(draws=True, most=None))
"""What is captured at start. Steps that truncate are captured when they are first met."""


class StepGrid:
    """A step for each pair of sizes, made when it is first needed, or all of them by `capture`."""

    def __init__(self, make: Callable[[int, int], FixedStep], max_sequences: int, max_draft: int) -> None:
        """make: from sequences and draft tokens of each to a step."""
        self._make = make
        self._sequences = doubled(1, max_sequences)
        self._drafts = [0, *doubled(LEAST_DRAFT, max_draft)] if max_draft else [0]
        self._steps: dict[tuple[int, int], FixedStep] = {}

    def capture(self) -> None:
        """Capture every shape, on a CUDA device; the largest first, whose memory then serves the others."""
        pool = torch.cuda.graph_pool_handle()
        for sequences in reversed(self._sequences):
            for drafted in reversed(self._drafts):
                for kind in AT_START:
                    self._step(sequences, drafted).capture(kind, pool)

    def run(self, orders: Orders, kind: Kind) -> Arriving:
        """Run a step in the least shape that holds it; see `FixedStep.run`."""
        sequences = next(size for size in self._sequences if size >= len(orders.seats))
        drafted = next(size for size in self._drafts if size >= max(*orders.most, *orders.spare))
        return self._step(sequences, drafted).run(orders, kind)

    def _step(self, sequences: int, drafted: int) -> FixedStep:
        sizes = sequences, drafted
        if sizes not in self._steps:
            self._steps[sizes] = self._make(*sizes)
        return self._steps[sizes]


def doubled(first: int, last: int) -> list[int]:
    """`first`, twice that, and so on, up to `last`, which is the end in any case."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]
