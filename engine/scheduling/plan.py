"""Input and results of a step of the engine. Nothing here outlives the step.

The scheduler makes a `StepPlan`: which sequences run, and how many committed tokens of each. Speculation adds drafts to
it, an executor runs it, and its results come back as a `StepResult`.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.drafters.sources import NO_SOURCES
from engine.scheduling.table import ADMISSION, KIND, NEEDS_HOST
from ssd.types import ROOT, offsets_of

if TYPE_CHECKING:  # The HTTP process imports this module and must not import PyTorch.
    from torch import Tensor

    from engine.sampling.grammar_state import GrammarError
    from engine.sampling.logprobs import Logprobs
    from engine.scheduling.sequence import Sequence
    from engine.scheduling.table import RequestTable
    from engine.speculation.draft_tree import DraftTree, OwnDraft
    from ssd.budget.token_budget import StepPrice
    from ssd.types import DraftBatch

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


class DraftRows(NamedTuple):
    """Draft tokens of the P producing sequences of a step."""

    tokens: np.ndarray
    """uint32 [T]."""
    sources: np.ndarray
    """uint8 [T]: what proposed each token; empty if the device makes the drafts."""
    offsets: np.ndarray
    """uint32 [P + 1]: sequence i has the draft `tokens[offsets[i]:offsets[i + 1]]`."""
    lengths: np.ndarray
    """int64 [P]: number of leading tokens of each draft that the step verifies."""


@dataclass(eq=False)
class StepPlan:
    """The sequences of one step, with their drafts.

    Sequences that run only their last committed token are rows of the table; most steps have no others. `entries` has
    an object for each sequence, made on first use, for drafters and executors that need them.
    """

    chunks: list[SequencePlan]
    """Sequences with prompt tokens to run, in the order of their arrival; or all, in a plan that no scheduler made."""
    table: RequestTable[Sequence] | None = None
    decoding: np.ndarray = field(default_factory=lambda: NO_ROWS)
    """int64 [D]: rows of the other sequences, in the order of their arrival."""
    drafts: DraftBatch | None = None
    """Drafts of the producing sequences, if they are not in `entries`."""
    lengths: np.ndarray | None = None
    """int64 [P]: number of leading tokens of each of these drafts that the step verifies; None if the drafts are in
    `entries`."""
    own_entries: dict[int, SequencePlan] = field(default_factory=dict)
    """Entries that were made before the others, by index in `rows`: those of requests with a grammar."""
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
    began: float = 0.0
    """When its planning began, by `time.perf_counter`."""
    kinds: int = 0
    """All bits of KIND of the producing sequences, see `engine.scheduling.table`."""
    admissions: np.ndarray = field(default_factory=lambda: NO_ROWS)
    """int64 [P]: ADMISSION of the producing sequences when the step was planned."""
    lacking_pages: int = 0
    """Number of pages that the page tables of the producing sequences on the device lack."""
    ends: np.ndarray = field(default_factory=lambda: NO_ROWS)
    """int64 [P]: upper bound of the number of each producing sequence's tokens in the cache after the step, without its
    draft."""

    def part(self, entries: list[SequencePlan]) -> StepPlan:
        """Return the plan for some of its entries."""
        return replace(self, chunks=entries, decoding=NO_ROWS, lengths=None)

    def has(self, kind: int) -> bool:
        """Return whether a producing sequence has a bit of KIND, see `engine.scheduling.table`."""
        return bool(self.kinds & kind)

    @property
    def needs_host(self) -> bool:
        """Whether a sequence of the step needs the host, see NEEDS_HOST."""
        return self.has(NEEDS_HOST) or any(chunk.sequence.state[KIND] & NEEDS_HOST for chunk in self.chunks)

    @cached_property
    def entries(self) -> list[SequencePlan]:
        """One per sequence; first those that decode."""
        if self.table is None or not len(self.decoding):
            return self.chunks
        sequences, rooms = self.table.of(self.decoding), self.rooms.tolist()
        own = [
            SequencePlan(sequence, sequence.computed, 1, produces=True, draft_room=room)
            for sequence, room in zip(sequences, rooms, strict=False)
        ]
        return [*own, *self.chunks]

    @cached_property
    def producing(self) -> list[SequencePlan]:
        """Entries that yield tokens; only these have drafts."""
        return [entry for entry in self.entries if entry.produces]

    @cached_property
    def rows(self) -> np.ndarray:
        """int64 [P]: rows of the producing sequences in the table."""
        if not self.chunks:
            return self.decoding
        last_chunks = [chunk.sequence.row for chunk in self.chunks if chunk.produces]
        return np.append(self.decoding, last_chunks).astype(np.int64)

    @property
    def is_running(self) -> bool:
        """Whether a sequence of the step still runs."""
        if any(chunk.sequence.is_running for chunk in self.chunks):
            return True
        return self.table is not None and bool((self.table.state[self.rows, ADMISSION] == self.admissions).any())

    @cached_property
    def rooms(self) -> np.ndarray:
        """int64 [P]: `draft_room` of the producing sequences."""
        return np.array([entry.draft_room for entry in self.producing], np.int64)

    @property
    def draft(self) -> DraftRows:
        """The draft tokens to verify."""
        if self.lengths is None:
            drafts = [
                entry.draft if len(entry.draft) else np.zeros(entry.max_verified, np.uint32) for entry in self.producing
            ]
            sizes = np.array([len(draft) for draft in drafts], np.int64)
            sources = np.concatenate([NO_SOURCES, *(entry.sources for entry in self.producing)])
            return DraftRows(np.concatenate([NO_TOKENS, *drafts]), sources, offsets_of(sizes), sizes)
        if self.drafts is None:
            return DraftRows(NO_TOKENS, NO_SOURCES, np.zeros(len(self.lengths) + 1, np.uint32), self.lengths)
        return DraftRows(self.drafts.tokens, self.drafts.source, self.drafts.offsets, self.lengths)

    @cached_property
    def extra_room(self) -> int:
        """Sum of `extra_room` of the producing sequences."""
        return sum(entry.extra_room for entry in self.producing)

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return len(self.decoding) + len(self.chunks)

    @cached_property
    def producers(self) -> int:
        """Number of sequences that yield tokens (P)."""
        return len(self.decoding) + sum(chunk.produces for chunk in self.chunks)

    @property
    def scheduled(self) -> int:
        """Number of committed tokens that run."""
        return len(self.decoding) + sum(chunk.scheduled for chunk in self.chunks)

    @property
    def verified(self) -> int:
        """Largest number of draft tokens that the step verifies."""
        if self.lengths is not None:
            return int(self.lengths.sum())
        return sum(entry.max_verified for entry in self.producing)

    @property
    def tokens(self) -> int:
        """Largest number of tokens that run, drafts and extra rows included."""
        return self.scheduled + self.verified + self.extra_rows


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
