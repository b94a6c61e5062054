"""Input and results of a step of the engine. Nothing here outlives the step.

The scheduler makes a `StepPlan`: which sequences run, and how many committed tokens of each. Speculation adds drafts to
it, an executor runs it, and its results come back as a `StepResult`.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from engine.drafters.sources import NO_SOURCES
from ssd.types import ROOT

if TYPE_CHECKING:  # The HTTP process imports this module and must not import PyTorch.
    from torch import Tensor

    from engine.sampling.grammar_state import GrammarError
    from engine.sampling.logprobs import Logprobs
    from engine.scheduling.sequence import Sequence
    from engine.speculation.draft_tree import DraftTree, OwnDraft
    from ssd.budget.token_budget import StepPrice

NO_TOKENS = np.empty(0, np.uint32)
NO_ROWS = np.empty(0, np.int64)


@dataclass(eq=False, slots=True)
class SequencePlan:
    """The part of a step that belongs to one sequence: committed tokens that run, and a draft after them."""

    sequence: Sequence
    computed: int
    """Known number of leading tokens in the KV cache; steps in flight may add more."""
    scheduled: int
    """Number of committed tokens that the step runs after them."""
    produces: bool
    """Whether the scheduled tokens include the last committed one, so that the step yields the next token."""
    draft_room: int = 0
    """Largest number of draft tokens that the request, its maximum length and the pages allow."""
    draft: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    """uint32 [k]: draft tokens to verify."""
    tree: DraftTree | None = None
    """Shape of the draft; None if each token follows the one before it."""
    sources: np.ndarray = field(default_factory=lambda: NO_SOURCES)
    """uint8 [k]: what proposed each draft token, an `engine.drafters.sources.DraftSource` each."""
    q_rows: np.ndarray | None = None
    """int32 [k]: row of `StepPlan.q` that each draft token was sampled from, -1 for a deterministic candidate; None if
    all of them are deterministic."""

    proposed: OwnDraft | None = None
    """The drafter's own draft, if the request has a grammar; `draft` was made from it."""

    extra_room: int = 0
    """Largest number of extra rows that the size of the step and the pages allow."""
    extra: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    """uint32 [e]: tokens that run behind the draft for the drafter, and are not verified."""
    extra_tree: DraftTree | None = None
    """Shape of the extra rows; None if there are none."""

    max_verified: int = 0
    """Largest number of draft tokens that the step verifies. If the device drafts, `draft` is empty until its results
    are read."""

    @property
    def scored(self) -> range:
        """Positions of prompt tokens whose logits give the requested log-probabilities of the next prompt tokens."""
        sequence = self.sequence
        if sequence.request.sampling.prompt_logprobs is None:
            return range(0)
        last = len(sequence.request.prompt) - 1
        done = sum(len(part.tokens) for part in sequence.prompt_logprobs)
        assert min(self.computed, last) <= done, "prompt tokens whose log-probabilities are requested were not run"
        return range(done, min(self.computed + self.scheduled, last))

    @property
    def parents(self) -> np.ndarray:
        """int32 [k]: index of each draft token's parent, `ROOT` for a child of the context."""
        return np.arange(ROOT, len(self.draft) + ROOT, dtype=np.int32) if self.tree is None else self.tree.parents

    @property
    def draft_depths(self) -> np.ndarray:
        """int64 [k]: distance of each draft token from the last committed token, at least 1."""
        return np.arange(1, len(self.draft) + 1) if self.tree is None else self.tree.depths


@dataclass(eq=False)
class StepPlan:
    """The sequences of one step, with their drafts."""

    entries: list[SequencePlan]
    """One per sequence, in the order of their arrival."""
    price: StepPrice | None = None
    """What draft tokens and time are worth; None if durations of steps are not measured."""
    q: Tensor | None = None
    """float32 [R, V]: distributions that draft tokens were sampled from; None if none were."""
    extra_rows: int = 0
    """Number of extra rows of all entries."""
    drafts_on_device: bool = False
    """Whether the device makes the drafts, without calls of the drafter."""
    is_drafting: bool = False
    """Whether the drafter is called, or the device drafts, in this step."""
    is_backing_off: bool = False
    """Whether the drafter was not called because drafting was not worthwhile recently."""
    drafting_s: float = 0.0
    """Seconds by which drafting delayed the step."""

    @cached_property
    def producing(self) -> list[SequencePlan]:
        """Entries that yield tokens; only these have drafts."""
        return [entry for entry in self.entries if entry.produces]

    @property
    def scheduled(self) -> int:
        """Number of committed tokens that run."""
        return sum(entry.scheduled for entry in self.entries)

    @property
    def has_prompts(self) -> bool:
        """Whether the step runs prompt tokens beside the last committed token of each producing entry."""
        return self.scheduled > len(self.producing)

    @property
    def tokens(self) -> int:
        """Largest number of tokens that run, drafts and extra rows included."""
        return sum(entry.scheduled + entry.max_verified for entry in self.entries) + self.extra_rows


@dataclass(eq=False, slots=True)
class SequenceResult:
    """Results of a step for one sequence."""

    plan: SequencePlan
    tokens: np.ndarray
    """uint32 [n]: accepted draft tokens, then the target's own token; shorter where the output ends before that. Empty
    for a sequence that does not produce."""
    kept: np.ndarray
    """int64 [a]: indices of the accepted tokens within the draft, a path from the root."""
    logprobs: Logprobs | None = None
    """Log-probabilities of `tokens`, if requested."""
    error: GrammarError | None = None
    """Why the grammar cannot continue the output after `tokens`, which may then be empty."""
    hidden: Tensor | None = None
    """[scheduled + a, layers, hidden size]: hidden states of the scheduled tokens, whose positions begin with
    `plan.computed`, and of the accepted draft tokens; None unless the drafter needs them."""
    top_tokens: Tensor | None = None
    """int64 [1 + k, n]: tokens of the n largest logits after the last committed token and after each draft token,
    accepted or not; None unless the drafter needs them and the sequence produces."""
    top_logits: Tensor | None = None
    """float32 [1 + k, n]."""
    extra_tokens: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    """uint32 [e]: token of the largest logit after each of the plan's extra rows, before penalties and noise."""

    def of_draft(self, own: OwnDraft) -> SequenceResult:
        """Return the result as if the step had verified another draft."""
        plan = replace(self.plan, draft=own.tokens, tree=own.tree)
        return replace(self, plan=plan, kept=own.kept(self.tokens))

    @property
    def sequence_id(self) -> int:
        """The id that `Engine.add` returned."""
        return self.plan.sequence.sequence_id

    @property
    def drafted(self) -> int:
        """Number of draft tokens that were verified."""
        return len(self.plan.draft)

    @property
    def accepted(self) -> int:
        """Number of draft tokens that were accepted."""
        return len(self.kept)

    @property
    def sources(self) -> np.ndarray:
        """uint8 [drafted]: what proposed each draft token, an `engine.drafters.sources.DraftSource` each."""
        return self.plan.sources

    @property
    def accepted_sources(self) -> np.ndarray:
        """uint8 [accepted]: `sources` of the accepted draft tokens."""
        return self.plan.sources[self.kept]

    @property
    def max_accepted(self) -> int:
        """Number of draft tokens that could have been accepted: the length of the draft's longest path."""
        return int(self.plan.draft_depths.max()) if len(self.plan.draft) else 0


@dataclass(eq=False)
class StepResult:
    """Results of a step, in the order of `plan.entries`, without sequences that ended while it ran."""

    plan: StepPlan
    results: SequenceOf[SequenceResult]
