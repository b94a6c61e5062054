"""Results of a step that were committed for all sequences at once, as an object per sequence for those who need it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import cached_property
from typing import overload

import numpy as np

from engine.scheduling.commit import FIRST_TOKEN, PRODUCED, VERIFIED
from engine.scheduling.plan import SequencePlan, SequenceResult, StepPlan
from engine.scheduling.sequence import Sequence


class RowResults(SequenceOf[SequenceResult]):
    """The results of the sequences that a step produced tokens for, made on first use."""

    def __init__(self, plan: StepPlan, values: np.ndarray, computed: np.ndarray) -> None:
        """values: int32 [P, FIRST_TOKEN + longest output], the step's results. computed: int64 [P], number of tokens of
        each sequence in the cache before the step.
        """
        self.plan = plan
        self.values = values
        self.kept = np.zeros(len(values), np.int64)
        """int64 [P]: number of committed tokens of each producing sequence; 0 for one that had ended before."""
        self.outcomes = np.zeros(len(values), np.int64)
        """int64 [P], see `engine.scheduling.commit`."""
        self.chosen: dict[int, SequenceResult] = {}
        """Results of the sequences whose tokens the host chose, by index."""
        self._computed = computed
        assert plan.table is not None
        self._sequences: SequenceOf[Sequence] = plan.table.of(plan.rows)

    def choose(self, chosen: dict[int, SequenceResult]) -> None:
        """Replace results by those of the host."""
        self.chosen = chosen
        for index, result in chosen.items():
            self.values[index, PRODUCED], self.values[index, VERIFIED] = 1 + result.accepted, result.drafted
            self.values[index, FIRST_TOKEN : FIRST_TOKEN + len(result.tokens)] = result.tokens

    @property
    def committed(self) -> int:
        """Number of committed tokens."""
        return int(self.kept.sum())

    @property
    def accepted(self) -> int:
        """Number of accepted draft tokens."""
        return int(np.minimum(self.kept, self.values[:, PRODUCED] - 1).clip(0).sum())

    @cached_property
    def producing(self) -> list[int]:
        """Indices of the sequences with committed tokens."""
        return np.flatnonzero(self.kept).tolist()

    def at(self, index: int) -> SequenceResult:
        """Return the result of producing sequence `index` of the plan, with all of its tokens so far."""
        if index in self.chosen:
            return self.chosen[index]
        _, verified, *_ = row = self.values[index]
        draft, kept = self.plan.draft, int(self.kept[index])
        first = int(draft.offsets[index])
        sources = draft.sources[first : first + verified]
        entry = SequencePlan(
            self._sequences[index], int(self._computed[index]), 1, produces=True,
            draft=draft.tokens[first : first + verified], sources=sources, max_verified=int(draft.lengths[index]),
        )  # fmt: skip
        tokens = row[FIRST_TOKEN : FIRST_TOKEN + kept].astype(np.uint32)
        return SequenceResult(entry, tokens, np.arange(min(kept, int(row[PRODUCED]) - 1)))

    def __len__(self) -> int:
        return len(self.producing)

    @overload
    def __getitem__(self, index: int) -> SequenceResult: ...

    @overload
    def __getitem__(self, index: slice) -> list[SequenceResult]: ...

    def __getitem__(self, index: int | slice) -> SequenceResult | list[SequenceResult]:
        if isinstance(index, slice):
            return [self.at(each) for each in self.producing[index]]
        return self.at(self.producing[index])
