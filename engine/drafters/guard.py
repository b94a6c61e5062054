"""Protects the engine from faults of a drafter.

If a call raises, or returns drafts that cannot be verified, the step runs without drafts. The first problem is logged
with its traceback; later ones are only counted, since a faulty drafter is likely to fail in every step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from engine.drafters.base import DETERMINISTIC, Drafter, Drafts, TargetOutputs
from engine.drafters.outcomes import OutcomeTable
from ssd.types import ROOT, DraftBatch

if TYPE_CHECKING:
    from engine.scheduling.plan import StepPlan, StepResult
    from engine.scheduling.sequence import Sequence

LOG = logging.getLogger(__name__)
DTYPES = {"tokens": np.uint32, "parents": np.int32, "accept_prob": np.float32, "source": np.uint8, "offsets": np.uint32}


class DraftsError(ValueError):
    """Drafts that cannot be verified."""


class GuardedDrafter:
    """Calls a drafter, contains its exceptions and checks its drafts."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.inner = drafter
        self.problems = 0
        """Number of calls that raised or returned invalid drafts."""
        self._vocab_size = vocab_size

    @property
    def needs(self) -> TargetOutputs:
        """See `Drafter.needs`."""
        return self.inner.needs

    @property
    def proposes_after(self) -> bool:
        """Whether the drafter has the optional method `propose_after`."""
        return hasattr(self.inner, "propose_after")

    def start(self, sequence: Sequence) -> None:
        """See `Drafter.start`."""
        with self._contained():
            self.inner.start(sequence)

    def propose(self, plan: StepPlan) -> Drafts:
        """See `Drafter.propose`."""
        with self._contained():
            drafts = self.inner.propose(plan)
            check_drafts(drafts, [entry.draft_room for entry in plan.producing], self._vocab_size)
            return drafts
        return Drafts.empty(len(plan.producing))

    def propose_after(self, plan: StepPlan) -> OutcomeTable | None:
        """See `Drafter`; None if the drafter lacks the method or fails."""
        if self.proposes_after:
            with self._contained():
                return self.inner.propose_after(plan)  # type: ignore[attr-defined]
        return None

    def observe(self, result: StepResult) -> None:
        """See `Drafter.observe`."""
        with self._contained():
            self.inner.observe(result)

    def finish(self, sequence: Sequence, learn: bool) -> None:
        """See `Drafter.finish`."""
        with self._contained():
            self.inner.finish(sequence, learn)

    def close(self) -> None:
        """See `Drafter.close`."""
        with self._contained():
            self.inner.close()

    @contextmanager
    def _contained(self) -> Iterator[None]:
        try:
            yield
        except Exception as problem:
            self.problems += 1
            if self.problems == 1:
                LOG.warning(
                    "the drafter failed, and the step continues without its drafts; further failures are not reported: "
                    "%s: %s",
                    type(problem).__name__,
                    problem,
                    exc_info=True,
                )


def check_drafts(drafts: Drafts, rooms: list[int], vocab_size: int) -> None:
    """Raise DraftsError unless a step can verify these drafts; `rooms`: largest length of each."""
    batch = drafts.batch
    _check_arrays(batch)
    offsets = batch.offsets.astype(np.int64)
    lengths = offsets[1:] - offsets[:-1]
    if len(lengths) != len(rooms) or (lengths < 0).any() or offsets[0] != 0 or offsets[-1] != len(batch.tokens):
        raise DraftsError(f"offsets do not divide {len(batch.tokens)} tokens into {len(rooms)} drafts")
    if (lengths > rooms).any():
        index = int((lengths > rooms).argmax())
        raise DraftsError(f"draft {index} has {lengths[index]} tokens; at most {rooms[index]} can be verified")
    if not len(batch.tokens):
        return
    if int(batch.tokens.max()) >= vocab_size:
        raise DraftsError(f"token id {int(batch.tokens.max())} is out of vocabulary; ids are 0 to {vocab_size - 1}")
    places = np.arange(len(batch.tokens)) - np.repeat(offsets[:-1], lengths)
    if ((batch.parents < ROOT) | (batch.parents >= places)).any():
        raise DraftsError("a draft token does not come after its parent")
    if not ((batch.accept_prob >= 0) & (batch.accept_prob <= 1)).all():
        raise DraftsError("accept_prob is not a probability")
    if drafts.q_rows is not None:
        _check_distributions(drafts, drafts.q_rows, vocab_size)


def _check_arrays(batch: DraftBatch) -> None:
    for name, dtype in DTYPES.items():
        array = getattr(batch, name)
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            raise DraftsError(f"{name} is not a row of {np.dtype(dtype).name}")
        if name != "offsets" and len(array) != len(batch.tokens):
            raise DraftsError(f"{name} has {len(array)} elements for {len(batch.tokens)} tokens")


def _check_distributions(drafts: Drafts, rows: np.ndarray, vocab_size: int) -> None:
    if rows.dtype != np.int32 or rows.shape != drafts.batch.tokens.shape:
        raise DraftsError("q_rows is not a row of int32, one per token")
    count = 0 if drafts.q is None else len(drafts.q)
    if ((rows < DETERMINISTIC) | (rows >= count)).any():
        raise DraftsError(f"q_rows refers to rows beyond the {count} of q")
    if drafts.q is not None and drafts.q.shape[1:] != (vocab_size,):
        raise DraftsError(f"q has rows of {tuple(drafts.q.shape[1:])}, not of the vocabulary's {vocab_size} entries")
