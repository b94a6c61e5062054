"""Protect the engine from a faulty drafter.

If a call raises, or drafts of a third party's drafter cannot be verified, the step runs without drafts. Failures are
counted, and logged with a traceback at most once a minute. A drafter that fails repeatedly (`ssd.errors.Failures`) is
not called any more, except to finish sequences that it has started.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from engine.drafters.base import Drafter, TargetOutputs
from engine.drafters.drafts import DETERMINISTIC, Drafts, ExtraRows
from engine.drafters.tokens import TokenDrafter
from engine.scheduling.table import MAX_DRAFT
from ssd.errors import Failures
from ssd.types import ROOT, DraftBatch

if TYPE_CHECKING:
    from torch import Tensor

    from engine.scheduling.plan import StepPlan
    from engine.scheduling.result import StepResult
    from engine.scheduling.sequence import Sequence

R = TypeVar("R")

LOG = logging.getLogger(__name__)
DTYPES: dict[str, type[np.generic]] = {
    "tokens": np.uint32,
    "parents": np.int32,
    "accept_prob": np.float32,
    "source": np.uint8,
    "offsets": np.uint32,
}
Q_TOLERANCE = 1e-3
"""Largest deviation of the sum of a row of `q` from 1; float32 sums over 150,000 entries have smaller errors."""


class DraftsError(ValueError):
    """Raised for drafts that cannot be verified."""


class GuardedDrafter:
    """Calls a drafter, contains its exceptions and checks the drafts of third parties."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.inner = drafter
        self.failures = Failures()
        """Calls that failed, or returned invalid drafts."""
        self._has_failed = False
        """Whether a call has failed since drafts were last requested."""
        self._vocab_size = vocab_size
        self._is_trusted = drafter.is_trusted
        self._started: set[int] = set()
        """Ids of the sequences that the drafter has started and not finished."""

    @property
    def needs(self) -> TargetOutputs:
        """See `Drafter.needs`."""
        return self.inner.needs

    def start(self, sequence: Sequence) -> None:
        """See `Drafter.start`. Does nothing for a sequence that was started before."""
        if not self.failures.is_off and sequence.sequence_id not in self._started:
            self._started.add(sequence.sequence_id)
            self._call(lambda: self.inner.start(sequence))

    def propose(self, plan: StepPlan) -> Drafts:
        """See `Drafter.propose`. Requests that want no drafts are left out."""
        if isinstance(self.inner, TokenDrafter):  # It leaves them out itself.
            return self._propose(plan)
        wanted = np.flatnonzero(plan.table.state[plan.rows, MAX_DRAFT])
        if len(wanted) == plan.producers:
            return self._propose(plan)
        return self._propose(plan.take(wanted)).scatter(wanted, plan.producers)

    def _propose(self, plan: StepPlan) -> Drafts:
        if not self._has_failed:
            self.failures.succeeded()
        self._has_failed = False
        if self._is_trusted:
            return self._call(lambda: self.inner.propose(plan)) or Drafts.empty(plan.producers)
        # Read first, in case the drafter changes the plan.
        rooms, extra_rooms = plan.rooms.copy(), plan.extra_rooms.copy()
        found = self._call(lambda: checked(self.inner.propose(plan), rooms, extra_rooms, self._vocab_size))
        return found or Drafts.empty(plan.producers)

    def observe(self, result: StepResult) -> None:
        """See `Drafter.observe`."""
        self._call(lambda: self.inner.observe(result))

    def finish(self, sequence: Sequence, learn: bool) -> None:
        """See `Drafter.finish`. A drafter that is switched off is called, too, if it has started the sequence."""
        if sequence.sequence_id in self._started:
            self._started.remove(sequence.sequence_id)
            self._call(lambda: self.inner.finish(sequence, learn), is_required=True)

    def close(self) -> None:
        """See `Drafter.close`."""
        self._call(lambda: self.inner.close(), is_required=True)

    def _call(self, act: Callable[[], R], *, is_required: bool = False) -> R | None:
        """Return the result of a call of the drafter; None if it fails, or if the drafter is switched off.

        is_required: whether it is also called when it is switched off.
        """
        if self.failures.is_off and not is_required:
            return None
        try:
            return act()
        except Exception as problem:
            self._has_failed = True
            if (end := self.failures.add()) is not None:
                LOG.warning("the drafter failed: %s: %s; %s", type(problem).__name__, problem, end, exc_info=True)
            return None


def checked(drafts: Drafts, rooms: np.ndarray, extra_rooms: np.ndarray, vocab_size: int) -> Drafts:
    """Return drafts whose arrays kernels can read. Raises DraftsError unless a step can run them.

    rooms, extra_rooms: int64 [B], largest numbers of draft tokens and of extra rows of each sequence.
    """
    batch = drafts.batch
    _check_arrays(batch, tuple(DTYPES))
    _check_trees(batch, rooms)
    _check_tokens(batch.tokens, vocab_size)
    if not ((batch.accept_prob >= 0) & (batch.accept_prob <= 1)).all():
        raise DraftsError("accept_prob is not a probability")
    if drafts.q_rows is not None and len(batch.tokens):
        _check_distributions(drafts, drafts.q_rows, vocab_size)
    if (extra := drafts.extra) is not None:
        if not isinstance(extra, ExtraRows):
            raise DraftsError(f"extra is {type(extra).__name__}, not ExtraRows")
        _check_arrays(extra, ("tokens", "parents", "offsets"))
        _check_trees(extra, extra_rooms)
        _check_tokens(extra.tokens, vocab_size)
    # Drafters may return views.
    arrays = {name: np.ascontiguousarray(vars(batch)[name]) for name in DTYPES}
    return replace(drafts, batch=replace(batch, **arrays))  # type: ignore[arg-type]


def _check_arrays(batch: DraftBatch | ExtraRows, names: tuple[str, ...]) -> None:
    for name in names:
        array, dtype = vars(batch)[name], DTYPES[name]
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            raise DraftsError(f"{name} is not a 1-D {np.dtype(dtype).name} array")
        if name != "offsets" and len(array) != len(batch.tokens):
            raise DraftsError(f"{name} has {len(array)} elements for {len(batch.tokens)} tokens")


def _check_trees(batch: DraftBatch | ExtraRows, rooms: np.ndarray) -> None:
    """Raise DraftsError unless offsets give a draft of allowed length to each sequence, and parents come first."""
    offsets, count = batch.offsets.astype(np.int64), len(rooms)
    lengths = offsets[1:] - offsets[:-1]
    if len(offsets) != count + 1 or (lengths < 0).any() or offsets[0] != 0 or offsets[-1] != len(batch.tokens):
        raise DraftsError(f"offsets do not divide {len(batch.tokens)} tokens into {count} drafts")
    if (lengths > rooms).any():
        index = int((lengths > rooms).argmax())
        raise DraftsError(f"draft {index} has {lengths[index]} tokens; at most {rooms[index]} can be verified")
    places = np.arange(len(batch.tokens)) - np.repeat(offsets[:-1], lengths)
    if ((batch.parents < ROOT) | (batch.parents >= places)).any():
        raise DraftsError("a draft token does not come after its parent")


def _check_tokens(tokens: np.ndarray, vocab_size: int) -> None:
    if len(tokens) and int(tokens.max()) >= vocab_size:
        raise DraftsError(f"token id {int(tokens.max())} is out of vocabulary; ids are 0 to {vocab_size - 1}")


def _check_distributions(drafts: Drafts, q_rows: np.ndarray, vocab_size: int) -> None:
    if q_rows.dtype != np.int32 or q_rows.shape != drafts.batch.tokens.shape:
        raise DraftsError("q_rows is not a 1-D int32 array with one element per token")
    count = 0
    if drafts.q is not None:
        _check_q(drafts.q, vocab_size)
        count = len(drafts.q)
    if ((q_rows < DETERMINISTIC) | (q_rows >= count)).any():
        raise DraftsError(f"q_rows refers to rows beyond the {count} of q")
    places = np.arange(len(q_rows)) - drafts.batch.offsets[:-1].astype(np.int64)[drafts.owner]
    branches = drafts.owner[drafts.batch.parents != places - 1]
    if np.isin(branches, drafts.owner[q_rows != DETERMINISTIC]).any():
        raise DraftsError("a draft with tokens that were sampled from q is not a path")


def _check_q(q: Tensor, vocab_size: int) -> None:
    """Raise DraftsError unless `q` has distributions over the vocabulary that verification can read."""
    import torch

    if not isinstance(q, torch.Tensor) or q.dtype != torch.float32 or q.layout != torch.strided or q.is_meta:
        raise DraftsError("q is not a dense float32 tensor")
    if q.requires_grad:
        raise DraftsError("q requires a gradient; compute it under torch.inference_mode")
    if q.shape[1:] != (vocab_size,):
        raise DraftsError(f"q has rows of {tuple(q.shape[1:])}, not of the vocabulary's {vocab_size} entries")
    # NaN fails both comparisons.
    if not bool(((q.sum(dim=1) - 1).abs() <= Q_TOLERANCE).all() & (q >= 0).all()):
        raise DraftsError("a row of q is not a probability distribution")
