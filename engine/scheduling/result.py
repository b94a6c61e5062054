"""Results of a step of the engine, as arrays over the sequences that yield tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.drafters.drafts import DETERMINISTIC, Drafts
from engine.drafters.sources import NO_SOURCES
from engine.scheduling.kernels import FIRST_TOKEN, PRODUCED, VERIFIED, Counts
from engine.scheduling.plan import NO_ROWS, NO_TOKENS, StepPlan
from engine.scheduling.table import KIND, SAMPLED, SEQUENCE_ID
from engine.speculation.draft_tree import depths_of, find_paths

if TYPE_CHECKING:  # The HTTP process imports this module and must not import PyTorch.
    from torch import Tensor

    from engine.sampling.grammar_state import GrammarError
    from engine.sampling.logprobs import Logprobs
    from ssd.acceptance import AcceptanceTable


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

    def each(self) -> Iterator[tuple[int, np.ndarray, int]]:
        """Yield the id, the committed tokens and the number of accepted ones among them, for each sequence."""
        parts = np.split(self.tokens, self.lengths.cumsum()[:-1])
        yield from zip(self.ids.tolist(), parts, self.accepted.tolist(), strict=False)


NOTHING = Counts(0, 0, 0, 0, 0)
NO_RESULTS = ResultArrays(NO_ROWS, NO_ROWS, NO_TOKENS, NO_ROWS, NO_ROWS, NO_SOURCES, NO_SOURCES, {})


@dataclass(eq=False)
class StepResult:
    """Results of the P producing sequences of a step. Outputs are cut where they end when they are committed.

    The arrays `values` and `paths` have room for W tokens of each sequence.
    """

    plan: StepPlan
    values: np.ndarray
    """int32 [P, FIRST_TOKEN + W]: numbers of tokens and of verified draft tokens, then accepted draft tokens and the
    target's own token. See `engine.scheduling.kernels`."""
    paths: np.ndarray | None = None
    """int64 [P, W]: indices of the accepted tokens within each draft; None if they are the first ones."""
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    """Log-probabilities of the tokens by index, for those that requested them."""
    errors: dict[int, GrammarError] = field(default_factory=dict)
    """Reasons by index why a grammar cannot continue the output after its tokens, of which there may be none."""
    hidden: Tensor | None = None
    """[H, layers, hidden size]: hidden states of the scheduled tokens of all B sequences of the plan, whose positions
    begin with `plan.computed`, and of accepted draft tokens after them; None unless the drafter needs them."""
    hidden_offsets: np.ndarray = field(default_factory=lambda: NO_ROWS)
    """int64 [B + 1]: where the hidden states of each sequence begin."""
    top_tokens: Tensor | None = None
    """int64 [P + K, n]: tokens of the n largest logits after the last committed token of each sequence and after each
    of its verified draft tokens, K in all, accepted or not; None unless the drafter needs them."""
    top_logits: Tensor | None = None
    """float32 [P + K, n]."""
    extra_tokens: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    """uint32 [E]: token of the largest logit after each of the plan's extra rows, before penalties and noise."""

    ids: np.ndarray = field(init=False)
    """int64 [P]: the ids that `Engine.add` returned."""
    lengths: np.ndarray = field(init=False)
    """int64 [P]: number of committed tokens of each sequence; 0 for one that had ended before."""
    outcomes: np.ndarray = field(init=False)
    """int64 [P], see `engine.scheduling.kernels`."""
    counts: Counts = NOTHING
    """Sums over the sequences; those whose requests decide where they end are added by `add`."""

    def __post_init__(self) -> None:
        """Make room for what the commit writes, and keep the ids, which are lost when sequences end."""
        self.ids = self.plan.table.state[self.plan.rows, SEQUENCE_ID]
        self.lengths, self.outcomes = np.zeros((2, len(self.values)), np.int64)

    def add(self, index: int, length: int) -> None:
        """Note how many tokens of a sequence were committed, whose request decides where it ends."""
        self.lengths[index] = length
        if length:
            producing, committed, accepted, *rest = self.counts
            own = min(length, int(self.values[index, PRODUCED]) - 1)
            self.counts = Counts(producing + 1, committed + length, accepted + own, *rest)

    @property
    def accepted(self) -> np.ndarray:
        """int64 [P]: number of accepted draft tokens among the committed ones."""
        return np.minimum(self.lengths, self.values[:, PRODUCED] - 1).clip(0)

    @cached_property
    def verified(self) -> np.ndarray:
        """int64 [P]: number of leading tokens of each draft that were verified."""
        return self.values[:, VERIFIED].astype(np.int64)

    def tokens_of(self, index: int) -> np.ndarray:
        """Return the committed tokens of a sequence, uint32 [n]."""
        return self.values[index, FIRST_TOKEN : FIRST_TOKEN + self.lengths[index]].astype(np.uint32)

    def path_of(self, index: int) -> np.ndarray:
        """Return the indices of the accepted tokens within the draft of a sequence, int64 [a], a path from the root."""
        accepted = max(0, min(int(self.lengths[index]), int(self.values[index, PRODUCED]) - 1))
        return np.arange(accepted) if self.paths is None else self.paths[index, :accepted]

    def draft_of(self, index: int) -> slice:
        """Return where the verified draft tokens of a sequence are in `plan.drafts`."""
        first = int(self.plan.drafts.batch.offsets[index])
        return slice(first, first + int(self.verified[index]))

    def hidden_of(self, index: int) -> Tensor:
        """Return the hidden states of one of the B sequences of the plan, [n, layers, hidden size]."""
        assert self.hidden is not None
        return self.hidden[self.hidden_offsets[index] : self.hidden_offsets[index + 1]]

    def extra_of(self, index: int) -> np.ndarray:
        """Return the tokens after the extra rows of a sequence, uint32 [e], see `extra_tokens`."""
        extra = self.plan.drafts.extra
        return NO_TOKENS if extra is None else self.extra_tokens[extra.offsets[index] : extra.offsets[index + 1]]

    @property
    def is_verified(self) -> np.ndarray:
        """bool [T]: which tokens of `plan.drafts` were verified, of sequences with committed tokens."""
        return self._places < np.where(self.lengths > 0, self.verified, 0).repeat(self.plan.drafts.sizes)

    @property
    def is_accepted(self) -> np.ndarray:
        """bool [T]: which tokens of `plan.drafts` were accepted."""
        if self.paths is None:
            return self._places < self.accepted.repeat(self.plan.drafts.sizes)
        is_accepted = np.zeros(len(self._places), np.bool_)
        is_node = np.arange(self.paths.shape[1]) < self.accepted[:, None]
        is_accepted[(self.plan.drafts.batch.offsets[:-1, None] + self.paths)[is_node]] = True
        return is_accepted

    @cached_property
    def sources(self) -> np.ndarray:
        """uint8 [T]: sources of the draft tokens, in each draft those of accepted tokens first."""
        source = self.plan.drafts.batch.source
        if self.paths is None:
            return source
        return source[np.lexsort((~self.is_accepted, self.plan.drafts.owner))]

    @cached_property
    def draft_depths(self) -> np.ndarray:
        """int64 [T]: distance of each token of `plan.drafts` from the context, at least 1."""
        batch = self.plan.drafts.batch
        return depths_of(batch.parents, batch.offsets)

    @property
    def depths(self) -> np.ndarray:
        """int64 [P]: largest number of verified draft tokens that could have been accepted."""
        if self.paths is None:
            return self.verified
        depths = np.zeros(len(self.values), np.int64)
        is_verified = self._places < self.verified.repeat(self.plan.drafts.sizes)
        np.maximum.at(depths, self.plan.drafts.owner[is_verified], self.draft_depths[is_verified])
        return depths

    @cached_property
    def arrays(self) -> ResultArrays:
        """The results of the sequences with committed tokens."""
        is_producing, source = self.lengths > 0, self.plan.drafts.batch.source
        outputs, order = self.values[:, FIRST_TOKEN:], np.cumsum(is_producing) - 1
        return ResultArrays(
            self.ids[is_producing], self.lengths[is_producing],
            outputs[np.arange(outputs.shape[1]) < self.lengths[:, None]].astype(np.uint32),
            self.accepted[is_producing], self.depths[is_producing],
            source[self.is_verified], source[self.is_accepted],
            {int(order[at]): each for at, each in self.logprobs.items() if is_producing[at]},
        )  # fmt: skip

    def teach(self, table: AcceptanceTable) -> np.ndarray:
        """Let a table learn from the verified draft tokens whose parents were accepted.

        Returns the depth of the deepest of these tokens in each draft, int64 [P], 0 where nothing is learned.
        """
        drafts = self.plan.drafts
        if drafts.scores is None:
            return np.zeros(len(self.lengths), np.int64)
        is_verified, batch = self.is_verified, drafts.batch
        if drafts.q_rows is not None:
            # The table learns from comparisons with the target's tokens; rejection may accept other tokens.
            owner, is_from_q = drafts.owner, is_verified & (drafts.q_rows != DETERMINISTIC)
            is_verified &= np.bincount(owner, is_from_q, len(self.lengths))[owner] == 0
        is_sampled = self.plan.table.state[self.plan.rows, KIND] & SAMPLED != 0
        return table.learn(
            is_sampled, batch.parents, batch.offsets, drafts.scores, self.draft_depths, is_verified, self.is_accepted
        )

    def with_drafts(self, drafts: Drafts, indices: np.ndarray) -> StepResult:
        """Return the results as if the step had verified other drafts of some sequences.

        drafts: for all P sequences. indices: int64 [n], of the sequences for which they differ. A token that equals the
        committed one at its depth counts as accepted; tokens deeper than those as not verified.
        """
        plan = replace(self.plan, drafts=replace(drafts, extra=self.plan.drafts.extra))
        result = replace(self, plan=plan, values=self.values.copy())
        result.lengths, accepted = self.lengths, self.accepted
        width = self.values.shape[1] - FIRST_TOKEN
        result.paths = np.tile(np.arange(width), (len(self.values), 1)) if self.paths is None else self.paths.copy()
        batch, verified = drafts.batch, self.verified.copy()
        find_paths(
            batch.tokens, batch.parents, batch.offsets, result.values[:, FIRST_TOKEN:].astype(np.uint32), self.lengths,
            indices, verified, accepted, result.paths,
        )  # fmt: skip
        result.values[:, PRODUCED], result.values[:, VERIFIED] = 1 + accepted, verified
        return result

    @cached_property
    def _places(self) -> np.ndarray:
        """int64 [T]: index of each draft token within its draft."""
        offsets = self.plan.drafts.batch.offsets.astype(np.int64)
        return np.arange(offsets[-1]) - offsets[:-1].repeat(self.plan.drafts.sizes)
