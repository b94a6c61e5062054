"""Results of a step: as arrays for all sequences at once, and as an object per sequence for those who need it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np

from engine.drafters.sources import NO_SOURCES
from engine.sampling.logprobs import Logprobs
from engine.scheduling.commit import FIRST_TOKEN, PRODUCED, VERIFIED, Counts
from engine.scheduling.plan import NO_TOKENS, SequencePlan, SequenceResult, StepPlan
from engine.scheduling.sequence import Sequence
from engine.scheduling.table import SEQUENCE_ID


class ResultArrays(NamedTuple):
    """Results of the P sequences that a step produced tokens for."""

    ids: np.ndarray
    """int64 [P]: the ids that `Engine.add` returned."""
    lengths: np.ndarray
    """int64 [P]: number of committed tokens of each sequence, at least 1."""
    tokens: np.ndarray
    """uint32 [T]: committed tokens, those of one sequence after those of another."""
    accepted: np.ndarray
    """int64 [P]: number of leading committed tokens that are accepted draft tokens."""
    depths: np.ndarray
    """int64 [P]: largest number of draft tokens that could have been accepted."""
    drafted_sources: np.ndarray
    """uint8: what proposed each verified draft token, an `engine.drafters.sources.DraftSource` each."""
    accepted_sources: np.ndarray
    """uint8: those of the accepted draft tokens."""
    logprobs: dict[int, Logprobs]
    """Log-probabilities of committed tokens by index of the sequence, for those that requested them."""

    @classmethod
    def of(cls, results: SequenceOf[SequenceResult]) -> ResultArrays:
        """Return the arrays of an object per sequence."""
        numbers = [(each.sequence_id, len(each.tokens), each.accepted, each.max_accepted) for each in results]
        ids, lengths, accepted, depths = np.array(numbers, np.int64).reshape(-1, 4).T
        return cls(
            ids, lengths, np.concatenate([NO_TOKENS, *(each.tokens for each in results)]), accepted, depths,
            np.concatenate([NO_SOURCES, *(each.sources for each in results)]),
            np.concatenate([NO_SOURCES, *(each.accepted_sources for each in results)]),
            {index: each.logprobs for index, each in enumerate(results) if each.logprobs is not None},
        )  # fmt: skip


class RowResults(SequenceOf[SequenceResult]):
    """The results of the sequences that a step produced tokens for, made on first use."""

    def __init__(self, plan: StepPlan, values: np.ndarray, computed: np.ndarray) -> None:
        """values: int32 [P or more, FIRST_TOKEN + longest output], the step's results, which may be padded. computed:
        int64 [P], number of tokens of each sequence in the cache before the step.
        """
        self.plan = plan
        self.values = values[: len(plan.rows)]
        self.kept = np.zeros(len(plan.rows), np.int64)
        """int64 [P]: number of committed tokens of each producing sequence; 0 for one that had ended before."""
        self.outcomes = np.zeros(len(plan.rows), np.int64)
        """int64 [P], see `engine.scheduling.commit`."""
        self.counts = Counts(0, 0, 0, 0, 0)
        """Sums over the sequences; those whose requests decide where they end are added by `add`."""
        self.chosen: dict[int, SequenceResult] = {}
        """Results of the sequences whose tokens the host chose, by index."""
        self._computed = computed
        assert plan.table is not None
        self._sequences: SequenceOf[Sequence] = plan.table.of(plan.rows)
        self._ids = plan.table.state[plan.rows, SEQUENCE_ID]

    def choose(self, chosen: dict[int, SequenceResult]) -> None:
        """Replace results by those of the host."""
        self.chosen = chosen
        for index, result in chosen.items():
            self.values[index, PRODUCED], self.values[index, VERIFIED] = 1 + result.accepted, result.drafted
            self.values[index, FIRST_TOKEN : FIRST_TOKEN + len(result.tokens)] = result.tokens

    def add(self, index: int, kept: int) -> None:
        """Note how many tokens of a sequence were committed, whose request decides where it ends."""
        self.kept[index] = kept
        if kept:
            producing, committed, accepted, *rest = self.counts
            own = min(kept, int(self.values[index, PRODUCED]) - 1)
            self.counts = Counts(producing + 1, committed + kept, accepted + own, *rest)

    @cached_property
    def arrays(self) -> ResultArrays:
        """The results as arrays."""
        kept, draft, is_producing = self.kept, self.plan.draft, self.kept > 0
        accepted = np.minimum(kept, self.values[:, PRODUCED] - 1)
        verified = np.where(is_producing, self.values[:, VERIFIED], 0)
        outputs = self.values[:, FIRST_TOKEN:]
        sizes = np.diff(draft.offsets)
        places = np.arange(len(draft.sources)) - draft.offsets[:-1].repeat(sizes)
        order = np.cumsum(is_producing) - 1
        logprobs = {int(order[at]): each.logprobs for at, each in self.chosen.items() if each.logprobs is not None}
        return ResultArrays(
            self._ids[is_producing], kept[is_producing],
            outputs[np.arange(outputs.shape[1]) < kept[:, None]].astype(np.uint32),
            accepted[is_producing], verified[is_producing].astype(np.int64),
            draft.sources[places < verified.repeat(sizes)], draft.sources[places < accepted.repeat(sizes)], logprobs,
        )  # fmt: skip

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
        return self.counts.producing

    @overload
    def __getitem__(self, index: int) -> SequenceResult: ...

    @overload
    def __getitem__(self, index: slice) -> list[SequenceResult]: ...

    def __getitem__(self, index: int | slice) -> SequenceResult | list[SequenceResult]:
        if isinstance(index, slice):
            return [self.at(each) for each in self.producing[index]]
        return self.at(self.producing[index])
