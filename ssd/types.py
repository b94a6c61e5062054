"""Inputs and outputs of a drafter: flat arrays for a whole batch.

The same arrays go over the wire as packed bytes, so that nothing is converted token by token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ssd.config import MAX_DRAFT, check_cost
from ssd.corpus.ring import check_tokens, kind_of

if TYPE_CHECKING:
    from ssd.corpus.corpus import Corpus

ROOT = -1
"""Parent of a draft token that follows the context directly."""

PROPOSE_ID = (1 << 64) - 1
"""Id of the sequence that `propose` keeps; `check_sequence_id` refuses it for others."""

UINT32 = np.dtype(np.uint32)


def check_sequence_id(sequence_id: int) -> None:
    """Raise ValueError for an id outside 0 to 2^64 - 2."""
    if not 0 <= sequence_id < PROPOSE_ID:
        raise ValueError(f"a sequence id must be 0 to {PROPOSE_ID - 1}, not {sequence_id}")


def check_seed(seed: int | None) -> None:
    """Raise ValueError for a seed outside -2^63 to 2^63 - 1; None: there is no seed."""
    if seed is not None and not -(1 << 63) <= seed < 1 << 63:
        raise ValueError(f"a seed must be -2^63 to 2^63 - 1, not {seed}")


class Source(IntEnum):
    """Origin of a draft token."""

    CORPUS = 0
    """Another request, finished or running."""
    LOCAL = 1
    """The running request's own prompt and output."""
    FALLBACK = 2
    """In no match: requests produced it where no match was right (`ssd.kernels.fallback`)."""
    LIBRARY = 3
    """A finished request of another corpus, see `Corpus.read_from`."""


class DraftLimits(NamedTuple):
    """The most tokens that a draft can add to a step, and the least time that it takes."""

    depth: int = MAX_DRAFT
    """Largest number of tokens of a draft that a step can accept; 0 if the drafter never drafts."""
    position_steps: float = 0.0
    """Least time of drafting one token of each sequence, as a multiple of the time of a step without drafts."""
    cause: str = ""
    """Why `position_steps` is large, for messages."""


NO_LIMITS = DraftLimits()


class StepTime(NamedTuple):
    """A step that an engine has run. Impossible values are ignored, see `ssd.budget.curve.StepCurve.record`."""

    tokens: int
    """Number of its tokens: of prompts, and of each decoding sequence one and its verified draft tokens, with padding
    to `Padding.lengths`."""
    sequences: int
    """Number of sequences with any of them."""
    seconds: float
    """Its duration, without the time that drafting delayed it."""
    drafting_s: float = 0.0
    """Seconds by which drafting delayed it."""


ONE_EACH = np.empty(0, np.uint32)
"""`Progress.steps` for kernels if each sequence took one step."""


@dataclass(eq=False)
class Progress:
    """Progress of the B sequences of a batch since their last drafts. Not frozen, as `DraftBatch`."""

    sequence_ids: np.ndarray
    """uint64 [B]."""
    tokens: np.ndarray
    """uint32 [T]: tokens committed since each sequence's last draft (or its start), concatenated."""
    offsets: np.ndarray
    """uint32 [B + 1]: sequence i committed `tokens[offsets[i]:offsets[i + 1]]`."""
    verified: np.ndarray
    """uint32 [B]: number of tokens of the last draft that the target verified."""
    max_draft: np.ndarray
    """uint32 [B]: maximum number of draft tokens that the caller can use now."""
    cost: float | None = None
    """Cost of verifying one more token per sequence, as a fraction of a step, in (0, 1]; None: by the drafter's
    step-time curve."""
    steps: np.ndarray | None = None
    """uint32 [B]: number of target steps that produced each sequence's tokens; None: one each. The last draft was
    verified in the first of them."""
    other_tokens: int = 0
    """Tokens of the next step beside one of each sequence and the drafts, such as those of prompts."""
    other_sequences: int = 0
    """Sequences of the next step that are not in the batch."""
    step_times: Sequence[StepTime] = ()
    """Steps that the engine has run since the last drafts."""
    min_path_prob: float | None = None
    """Minimum path probability of a draft token, in (0, 1], for a caller that selects among the drafts of several
    drafters; None: the drafter selects what is worth verifying."""

    @classmethod
    def of_one(
        cls, sequence_id: int, tokens: np.ndarray, *, verified: int = 0, max_draft: int = 0, steps: int = 1
    ) -> Progress:
        """Return the progress of a single sequence that committed `tokens`, uint32 [T]."""
        return cls(
            sequence_ids=np.array([sequence_id], np.uint64),
            tokens=tokens,
            offsets=offsets_of(np.array([len(tokens)], np.uint32)),
            verified=np.array([verified], np.uint32),
            max_draft=np.array([max_draft], np.uint32),
            steps=np.array([steps], np.uint32) if steps > 1 else None,
        )

    def take(self, indices: np.ndarray) -> Progress:
        """Return the progress of some sequences, int64 [n], in their order."""
        lengths = np.diff(self.offsets.astype(np.int64))[indices]
        runs = [
            self.tokens[first : first + length] for first, length in zip(self.offsets[indices], lengths, strict=True)
        ]
        return replace(
            self,
            sequence_ids=self.sequence_ids[indices],
            tokens=_joined(runs, np.uint32),
            offsets=offsets_of(lengths),
            verified=self.verified[indices],
            max_draft=self.max_draft[indices],
            steps=None if self.steps is None else self.steps[indices],
        )

    def check_arrays(self) -> None:
        """Raise ValueError, with the field's name, for arrays of a wrong type or shape, or that do not fit together.

        It takes 1.0 us for one sequence, 1.4 us for 64.
        """
        counts = [self.verified, self.max_draft]
        if self.steps is not None:
            counts.append(self.steps)
        for array in (self.tokens, self.offsets, *counts):
            if getattr(array, "dtype", None) != UINT32 or array.ndim != 1 or not array.flags.c_contiguous:
                raise ValueError(f"{self._name_of(array)} must be a contiguous 1-D uint32 array, not {kind_of(array)}")
        if not isinstance(self.sequence_ids, np.ndarray):
            raise ValueError(f"sequence_ids must be a 1-D uint64 array, not {kind_of(self.sequence_ids)}")
        sequences, bounds = len(self.sequence_ids), self.offsets.tolist()
        if len(bounds) != sequences + 1:
            raise ValueError(f"offsets has {len(bounds)} elements, not {sequences + 1}: one more than sequences")
        if bounds[0] != 0 or bounds[-1] != len(self.tokens) or sorted(bounds) != bounds:
            raise ValueError(f"offsets must not decrease, from 0 to the number of tokens, {len(self.tokens)}")
        for array in counts:
            if len(array) != sequences:
                raise ValueError(f"{self._name_of(array)} has {len(array)} elements, not {sequences}: one per sequence")

    def check(self, offered: Mapping[int, int]) -> None:
        """Raise ValueError for progress that `Drafter.draft` must refuse.

        Reasons: those of `check_arrays`, a reserved token id, a sequence that is not running, appears twice or verified
        more tokens than it was offered, and a cost or minimum path probability outside (0, 1]. offered: number of
        tokens in the last draft of each running sequence, by id.
        """
        self.check_arrays()
        check_tokens(self.tokens)
        if self.cost is not None:
            check_cost(self.cost)
        if self.min_path_prob is not None:
            check_path_prob(self.min_path_prob)
        sequence_ids = self.sequence_ids.tolist()
        if len(set(sequence_ids)) != len(sequence_ids):
            raise ValueError("a sequence appears twice in the batch")
        for sequence_id, verified in zip(sequence_ids, self.verified.tolist(), strict=True):
            check_verified(sequence_id, verified, offered)

    def _name_of(self, array: np.ndarray) -> str:
        return next(name for name, own in vars(self).items() if own is array)


@dataclass(eq=False)
class DraftBatch:
    """Drafts for a batch of B sequences, T draft tokens in all.

    Not frozen, because setting the fields of a frozen dataclass would take 3 % of a draft's time.
    """

    tokens: np.ndarray
    """uint32 [T]."""
    parents: np.ndarray
    """int32 [T]: index of the parent within the sequence's own draft, `ROOT` for a child of the context."""
    accept_prob: np.ndarray
    """float32 [T]: estimated probability of acceptance, given that the parent is accepted."""
    source: np.ndarray
    """uint8 [T]: the `Source` of each token."""
    offsets: np.ndarray
    """uint32 [B + 1]: the draft of sequence i is `tokens[offsets[i]:offsets[i + 1]]`."""
    pause_steps: int = 0
    """Number of steps for which the caller should request no drafts, because they have cost more time than they saved;
    0 unless `StepTime.drafting_s` is known."""

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.offsets) - 1

    def tokens_of(self, index: int) -> np.ndarray:
        """Return the draft tokens of one sequence, uint32 [n]."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def parents_of(self, index: int) -> np.ndarray:
        """Return the parents of one sequence's draft tokens, int32 [n]."""
        return self.parents[self.offsets[index] : self.offsets[index + 1]]

    @classmethod
    def empty(cls, sequences: int) -> DraftBatch:
        """Return a batch without drafts for `sequences` sequences."""
        return cls(
            tokens=np.empty(0, np.uint32),
            parents=np.empty(0, np.int32),
            accept_prob=np.empty(0, np.float32),
            source=np.empty(0, np.uint8),
            offsets=np.zeros(sequences + 1, np.uint32),
        )

    @classmethod
    def concatenate(cls, batches: Sequence[DraftBatch]) -> DraftBatch:
        """Return the sequences of several batches, in order."""
        lengths = [batch.offsets[1:] - batch.offsets[:-1] for batch in batches]
        return cls(
            tokens=np.concatenate([batch.tokens for batch in batches]),
            parents=np.concatenate([batch.parents for batch in batches]),
            accept_prob=np.concatenate([batch.accept_prob for batch in batches]),
            source=np.concatenate([batch.source for batch in batches]),
            offsets=offsets_of(np.concatenate(lengths)),
        )

    @classmethod
    def of_nodes(
        cls,
        tokens: np.ndarray,
        parents: np.ndarray,
        accept_prob: np.ndarray,
        source: np.ndarray,
        nodes: np.ndarray,
        lengths: np.ndarray,
    ) -> DraftBatch:
        """Return drafts of chosen nodes of trees.

        tokens, accept_prob, source: [N]. parents: int64 [N], indices of nodes, or `ROOT`. nodes: int64 [T], those of
        each draft after those of the one before, parents before their children; the parent of a chosen node is chosen,
        too. lengths: int64 [B], number of nodes of each draft.
        """
        place = np.full(len(tokens) + 1, ROOT)
        place[nodes] = np.arange(len(nodes)) - (np.cumsum(lengths) - lengths).repeat(lengths)
        return cls(
            tokens=tokens[nodes].astype(np.uint32),
            parents=place[parents[nodes]].astype(np.int32),  # `ROOT` refers to the last element.
            accept_prob=accept_prob[nodes].astype(np.float32),
            source=source[nodes].astype(np.uint8),
            offsets=offsets_of(lengths),
        )

    def scatter(self, indices: np.ndarray, count: int) -> DraftBatch:
        """Return a batch of `count` sequences: these drafts at ascending `indices`, int64 [B], and no other drafts."""
        lengths = np.zeros(count, np.uint32)
        lengths[indices] = self.offsets[1:] - self.offsets[:-1]
        return replace(self, offsets=offsets_of(lengths))

    def places(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the places in `tokens` of the drafts of some sequences, in their order, int64 [n]."""
        bounds = self.offsets.astype(np.int64)
        return np.concatenate([np.empty(0, np.int64), *(np.arange(bounds[at], bounds[at + 1]) for at in indices)])

    def take(self, indices: Sequence[int] | np.ndarray) -> DraftBatch:
        """Return the drafts of some sequences, in their order."""
        places = self.places(indices)
        return replace(
            self,
            tokens=self.tokens[places],
            parents=self.parents[places],
            accept_prob=self.accept_prob[places],
            source=self.source[places],
            offsets=offsets_of((self.offsets[1:] - self.offsets[:-1])[np.asarray(indices, np.int64)]),
        )

    @classmethod
    def from_paths(cls, paths: Sequence[Path]) -> DraftBatch:
        """Return a batch with one path per sequence."""
        lengths = np.array([len(path.tokens) for path in paths], np.uint32)
        parents = [np.arange(ROOT, len(path.tokens) + ROOT, dtype=np.int32) for path in paths]
        return cls(
            tokens=_joined([path.tokens for path in paths], np.uint32),
            parents=_joined(parents, np.int32),
            accept_prob=_joined([path.accept_prob for path in paths], np.float32),
            source=np.repeat(np.array([path.source for path in paths], np.uint8), lengths),
            offsets=offsets_of(lengths),
        )


@dataclass(frozen=True, eq=False)
class Path:
    """A draft without branches, for one sequence."""

    tokens: np.ndarray
    """uint32 [n]."""
    accept_prob: np.ndarray
    """float32 [n]: probability that each token is accepted, given the one before it."""
    source: Source = Source.CORPUS


NO_PATH = Path(np.empty(0, np.uint32), np.empty(0, np.float32))


class Drafter(ABC):
    """Interface of drafters that work on tokens, embedded or remote, which inherit from it.

    A sequence is started once, drafted for any number of times, and finished once. `start` may have further arguments,
    which the engine gives by name: `hints`, `adapter`, `request_id`, `learn`, `rollout` and `seed` of the request.
    """

    limits: DraftLimits = NO_LIMITS
    """Limits of what drafts can save."""
    corpus: Corpus | None = None
    """The corpus that finished requests are added to, if it is in this process."""

    @property
    def is_connected(self) -> bool | None:
        """Whether a remote drafter is connected; None for others."""
        return None

    def start(self, sequence_id: int, prompt: np.ndarray) -> None:
        """Begin a sequence with its prompt, uint32 [P]. Raises ValueError for an id that is in use."""
        return

    @abstractmethod
    def draft(self, progress: Progress) -> DraftBatch:
        """Commit the tokens of a step, and draft the tokens that may follow.

        Raises ValueError for a sequence that was not started or appears twice in the batch, for more tokens verified
        than were offered, for a reserved token id, and for arrays that do not fit together.
        """

    def begin_draft(self, progress: Progress) -> Callable[[], DraftBatch]:
        """Return a function that returns the drafts, as `draft`. A remote drafter sends the request before."""
        return partial(self.draft, progress)

    def draft_after(self, progress: Progress) -> DraftBatch:
        """Return drafts as if the tokens had been committed, without committing them; none if it cannot.

        A sequence may appear several times.
        """
        return DraftBatch.empty(len(progress.sequence_ids))

    def finish(self, sequence_id: int, tokens: np.ndarray, *, verified: int = 0, learn: bool = True) -> None:
        """End a sequence. tokens: uint32 [n], committed since its last draft. verified: as in `Progress`.

        learn: whether the output may be drafted for other sequences. Raises ValueError as `draft`.
        """
        return

    def close(self) -> None:
        """Release threads and connections. No method may be called after it."""
        return


def check_path_prob(minimum: float) -> None:
    """Raise ValueError for a minimum path probability outside (0, 1]."""
    if not 0 < minimum <= 1:
        raise ValueError(f"min_path_prob must be greater than 0 and at most 1, not {minimum}")


def check_verified(sequence_id: int, verified: int, offered: Mapping[int, int]) -> None:
    """Raise ValueError for a sequence that is not running, or that verified more than its last draft had."""
    if sequence_id not in offered:
        raise ValueError(f"sequence {sequence_id} was not started")
    if not 0 <= verified <= offered[sequence_id]:
        raise ValueError(
            f"sequence {sequence_id} was offered {offered[sequence_id]} tokens; it cannot have verified {verified}"
        )


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Convert lengths [B] to offsets, uint32 [B + 1]."""
    offsets = np.zeros(len(lengths) + 1, np.uint32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _joined(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([*parts, np.empty(0, dtype)], dtype=dtype)
