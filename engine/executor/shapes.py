"""The shapes that steps are padded to: few enough to be captured at start, near enough to waste little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

from engine.executor.device_state import DeviceState
from engine.executor.fixed_step import FixedStep, Kind, StepOrder, order_columns
from engine.executor.transfer import Arriving
from engine.sampling.truncation import Truncation
from engine.scheduling.request import SamplingParams
from engine.speculation.step_cost import PaddedCost, StepCost

LEAST_DRAFT = 4
"""Rows for drafts that a step has at least, if it has any: a step of 5 tokens takes as long as one of 2."""
GREEDY, DRAWN = Kind(draws=False, most=None), Kind(draws=True, most=None)


class Captured(NamedTuple):
    """What a start has captured."""

    graphs: int
    seconds: float
    """Compiling what they run included, where that was never done."""


class StepGrid:
    """A step for each of some numbers of sequences and rows, made when it is first needed, or all of them by `capture`.

    Drafts may be spread over the sequences in any way: what a step takes goes by all of their tokens together.
    """

    def __init__(
        self, make: Callable[[int, int], FixedStep], state: DeviceState, max_sequences: int, max_draft: int
    ) -> None:
        """make: from numbers of sequences and rows to a step on the state."""
        self._make = make
        self.state = state
        self._max_draft = max_draft
        self.sequences = doubled(1, max_sequences)
        """Numbers of sequences that steps may have, rising."""
        self.captured = Captured(0, 0.0)
        self._steps: dict[tuple[int, int], FixedStep] = {}

    @property
    def greedy(self) -> Kind:
        """Of steps in which nothing is drawn. On a GPU one kernel takes what is largest and draws, at the same cost if
        nothing is; so one graph does both.
        """
        return DRAWN if self.state.lengths.is_cuda else GREEDY

    def kind_of(self, samplings: Sequence[SamplingParams], vocab_size: int) -> Kind:
        """How tokens are drawn for some requests; what is ranked is rounded up, so that there are few kinds."""
        if not any(sampling.truncates for sampling in samplings):
            return DRAWN if any(sampling.is_sampled for sampling in samplings) else self.greedy
        top_k, top_p, min_p = (
            np.array([getattr(sampling, name) for sampling in samplings]) for name in ("top_k", "top_p", "min_p")
        )
        most = Truncation(top_k, top_p, min_p).most(vocab_size)
        return Kind(True, min(1 << (most - 1).bit_length(), vocab_size) if most else 0)

    def shape_for(self, sequences: int, rows: int) -> tuple[int, int]:
        """The least shape that holds so many: its sequences and rows."""
        padded = next(size for size in self.sequences if size >= sequences)
        # Without rows for drafts there is no draft, even where sequences are fewer: attention relies on that.
        least = rows if rows == sequences else max(rows, padded + 1)
        return padded, next(size for size in self.rows_of(padded) if size >= least)

    def rows_of(self, sequences: int) -> list[int]:
        """Numbers of rows that steps of so many sequences may have, rising."""
        least = max(LEAST_DRAFT, sequences // 2)
        drafts = doubled(least, sequences * self._max_draft) if self._max_draft else []
        return [sequences, *(sequences + drafted for drafted in drafts)]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """All numbers of sequences and rows, rising."""
        return [(sequences, rows) for sequences in self.sequences for rows in self.rows_of(sequences)]

    def capture(self, say: Callable[[str], None], usual: Kind = DRAWN) -> None:
        """Capture every shape, on a CUDA device; the largest first, whose memory then serves the others. Steps that
        truncate in a way that was not expected are captured when they are first met.

        say: told before and after, since it takes a while. usual: what most requests are expected to need, beside what
        is neither drawn nor truncated.
        """
        kinds = dict.fromkeys((self.greedy, usual))
        shapes = [(*shape, kind) for shape in reversed(self.shapes) for kind in kinds]
        say(f"capturing {len(shapes)} CUDA graphs ... (the first time ever, kernels are compiled before)")
        began = perf_counter()
        pool = torch.cuda.graph_pool_handle()
        for sequences, rows, kind in shapes:
            self.step_of(sequences, rows).capture(kind, pool)
        self.captured = Captured(len(shapes), perf_counter() - began)
        say(f"captured {len(shapes)} CUDA graphs in {self.captured.seconds:.1f} s")

    def run(self, order: StepOrder, kind: Kind) -> Arriving:
        """Run a step in the smallest shape that holds it; see `FixedStep.run`."""
        return self.step_of(*self.shape_for(len(order.contexts), sum(order.rows))).run(order, kind)

    def padded_rows(self, tokens: np.ndarray | int, sequences: int) -> np.ndarray:
        """Return the rows of the smallest shapes that hold these tokens; `tokens` where no shape is large enough."""
        padded = next(size for size in self.sequences if size >= sequences)
        sizes = np.array(self.rows_of(padded))
        # As in `shape_for`.
        places = np.searchsorted(sizes, np.where(np.equal(tokens, sequences), tokens, np.maximum(tokens, padded + 1)))
        return np.where(places < len(sizes), sizes[np.minimum(places, len(sizes) - 1)], tokens)

    def measure(self) -> PaddedCost:
        """Return what steps cost, measured on steps without sequences."""
        shapes = {rows: sequences for sequences, rows in self.shapes}
        nothing = StepOrder(np.zeros((0, order_columns(self._max_draft)), np.int32), [])

        def run(rows: int, _sequences: int) -> None:
            self.step_of(shapes[rows], rows).run(nothing, self.greedy).read()

        return PaddedCost(StepCost.measured(run, sorted(shapes)), self.padded_rows)

    def step_of(self, sequences: int, rows: int) -> FixedStep:
        """The step of a shape."""
        shape = sequences, rows
        if shape not in self._steps:
            self._steps[shape] = self._make(*shape)
        return self._steps[shape]


def doubled(first: int, last: int) -> list[int]:
    """`first`, twice that, and so on, up to `last`, which is the end in any case."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]
