"""Shapes that steps are padded to: few enough to capture all at start, close enough to keep padding small."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import torch

from engine.executor.device_state import DeviceState
from engine.executor.fixed_step import FixedStep, Kind
from engine.executor.kernels.dispatch import next_power_of_2
from engine.sampling.noise import max_ranked
from engine.scheduling.request import SamplingParams
from ssd.budget.curve import StepCurve, fastest, measured_curve
from ssd.budget.padding import Padding

MIN_DRAFT_ROWS = 4
"""Smallest number of draft rows of a step with drafts: a step of 5 tokens takes as long as one of 2."""
GREEDY, SAMPLED = Kind(samples=False, max_ranked=None), Kind(samples=True, max_ranked=None)


class Captured(NamedTuple):
    """CUDA graphs that were captured at start."""

    graphs: int
    seconds: float
    """Duration, including the compilation of kernels that are not cached."""


class StepGrid:
    """Steps for several numbers of sequences and rows, created on first use, or all at once by `capture`.

    The rows of a step may be distributed over its sequences in any way.
    """

    def __init__(
        self,
        make: Callable[[int, int], FixedStep],
        state: DeviceState,
        max_sequences: int,
        max_draft: int,
        *,
        drafts: bool = False,
    ) -> None:
        """make: returns the step on `state` for a number of sequences and a number of rows. drafts: whether the device
        drafts; steps that do not draft then have one row per sequence.
        """
        self._make = make
        self.state = state
        self._max_draft = max_draft
        self._drafts = drafts
        self.sequences = doubled(1, max_sequences)
        """Numbers of sequences that steps may have, ascending."""
        self.captured = Captured(0, 0.0)
        self._steps: dict[tuple[int, int], FixedStep] = {}

    @property
    def greedy(self) -> Kind:
        """The kind of greedy steps. On a GPU the sampling kernel is as fast for them, so one kind is enough."""
        return SAMPLED if self.state.lengths.is_cuda else GREEDY

    def kind_of(self, samplings: Sequence[SamplingParams], vocab_size: int) -> Kind:
        """Return the kind of a step of these requests; `max_ranked` is rounded up so that there are few kinds."""
        if not any(sampling.truncates for sampling in samplings):
            return SAMPLED if any(sampling.is_sampled for sampling in samplings) else self.greedy
        ranked = max_ranked(samplings, vocab_size)
        return Kind(True, min(next_power_of_2(ranked), vocab_size) if ranked else 0)

    def shape_for(self, sequences: int, rows: int) -> tuple[int, int]:
        """Return the smallest shape that holds these numbers of sequences and rows."""
        padded = self.sequences[bisect_left(self.sequences, sequences)]
        if rows == sequences:
            return padded, padded
        # In a shape with as many rows as sequences, each has at most one row; attention relies on that.
        sizes = self.rows_of(padded)
        return padded, sizes[bisect_left(sizes, max(rows, padded + 1))]

    def rows_of(self, sequences: int) -> list[int]:
        """Return the numbers of rows that steps of `sequences` sequences may have, ascending."""
        least = max(MIN_DRAFT_ROWS, sequences // 2)
        drafts = doubled(least, sequences * self._max_draft) if self._max_draft else []
        return [sequences, *(sequences + drafted for drafted in drafts)]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """All pairs (sequences, rows), ascending."""
        return [(sequences, rows) for sequences in self.sequences for rows in self.rows_of(sequences)]

    def capture(self, notify: Callable[[str], None], common: Kind = SAMPLED) -> None:
        """Capture every shape on a CUDA device, largest first, because the others share its memory.

        notify: called with a line before and after. common: the kind that most requests need, captured in addition to
        the greedy one; other kinds are captured on first use.
        """
        kinds = dict.fromkeys((self.greedy, common))
        shapes = [
            (sequences, rows, kind._replace(drafts=drafts))
            for sequences, rows in reversed(self.shapes)
            for kind in kinds
            for drafts in ((True, False) if self._drafts and rows == sequences else (self._drafts,))
        ]
        notify(f"capturing {len(shapes)} CUDA graphs ... (the first time ever, kernels are compiled before)")
        began = perf_counter()
        pool = torch.cuda.graph_pool_handle()
        for sequences, rows, kind in shapes:
            self.step_of(sequences, rows).capture(kind, pool)
        self.captured = Captured(len(shapes), perf_counter() - began)
        notify(f"captured {len(shapes)} CUDA graphs in {self.captured.seconds:.1f} s")

    def step_for(self, sequences: int, rows: int) -> FixedStep:
        """Return the smallest step that holds these numbers of sequences and rows."""
        return self.step_of(*self.shape_for(sequences, rows))

    def padding(self, sequences: int) -> Padding:
        """Return the numbers of rows that steps of a number of sequences are padded to."""
        padded = self.sequences[bisect_left(self.sequences, sequences)]
        # As in `shape_for`: without drafts, a step has the first shape, and with drafts one of the others.
        return Padding((sequences, *self.rows_of(padded)[1:]))

    def measure(self) -> StepCurve:
        """Measure the durations of steps that do not draft, by running steps without sequences."""
        shapes = {rows: sequences for sequences, rows in self.shapes if rows == sequences or not self._drafts}

        def run(rows: int, _sequences: int) -> None:
            self._run_empty((shapes[rows], rows), self.greedy)

        return measured_curve(run, sorted(shapes), padding=self.padding)

    def drafting_s(self, sequences: int) -> float:
        """Measure the seconds that drafting on the device adds to a step in which all of `sequences` have drafts."""
        shape = self.shape_for(sequences, sequences * (1 + self._max_draft))
        plain, drafting = self.greedy, self.greedy._replace(drafts=True)
        return max(0.0, fastest(self._run_empty, shape, drafting) - fastest(self._run_empty, shape, plain))

    def _run_empty(self, shape: tuple[int, int], kind: Kind) -> None:
        """Run a step without sequences and wait for it."""
        step = self.step_of(*shape)
        step.run(step.empty_inputs(), kind).results.read()

    def step_of(self, sequences: int, rows: int) -> FixedStep:
        """Return the step of a shape."""
        shape = sequences, rows
        if shape not in self._steps:
            self._steps[shape] = self._make(*shape)
        return self._steps[shape]


def doubled(first: int, last: int) -> list[int]:
    """Return `first`, twice that, and so on, below `last`, then `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]
