"""One drafter per LoRA adapter, so that no request is drafted from the outputs of another adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ssd.types import DraftBatch, Progress, offsets_of

if TYPE_CHECKING:
    from ssd import types


class AdapterDrafters:
    """One drafter for requests without an adapter, and one for each adapter, with the interface of a single one."""

    def __init__(self, base: types.Drafter, by_adapter: Mapping[str, types.Drafter]) -> None:
        """The drafters are of the same kind."""
        self._base: Any = base
        self._by_adapter: Mapping[str, Any] = by_adapter
        self._owners: dict[int, Any] = {}
        """The drafter of each running sequence."""
        if hasattr(base, "draft_after"):
            self.draft_after = partial(self._call, "draft_after")

    @property
    def corpus(self) -> object:
        """The corpus of requests without an adapter; None if it is in another process."""
        return getattr(self._base, "corpus", None)

    def start(
        self, sequence_id: int, prompt: np.ndarray, *, hints: np.ndarray | None = None, adapter: str | None = None
    ) -> None:
        """See `ssd.types.Drafter.start`. hints: as in `Request`. adapter: name of the request's adapter."""
        owner = self._base if adapter is None else self._by_adapter[adapter]
        owner.start(sequence_id, prompt, **({} if hints is None else {"hints": hints}))
        self._owners[sequence_id] = owner

    def draft(self, progress: Progress) -> DraftBatch:
        """See `ssd.types.Drafter.draft`."""
        return self._call("draft", progress)

    def finish(self, sequence_id: int, tokens: np.ndarray, *, verified: int = 0, learn: bool = True) -> None:
        """See `ssd.types.Drafter.finish`."""
        self._owners.pop(sequence_id).finish(sequence_id, tokens, verified=verified, learn=learn)

    def close(self) -> None:
        """See `ssd.types.Drafter.close`."""
        for drafter in (self._base, *self._by_adapter.values()):
            drafter.close()

    def _call(self, method: str, progress: Progress) -> DraftBatch:
        """Call a method of each drafter with its sequences, and return the drafts in the order of `progress`."""
        owners = [self._owners[sequence_id] for sequence_id in progress.sequence_ids.tolist()]
        distinct = list(dict.fromkeys(owners))
        if len(distinct) == 1:
            only: DraftBatch = getattr(distinct[0], method)(progress)
            return only
        parts = [np.array([index for index, each in enumerate(owners) if each is owner]) for owner in distinct]
        batches = [getattr(owner, method)(_part(progress, at)) for owner, at in zip(distinct, parts, strict=True)]
        return _in_order(DraftBatch.concatenate(batches), np.concatenate(parts).argsort())


def _part(progress: Progress, at: np.ndarray) -> Progress:
    """Return the progress of the sequences `at`, int64 [n]."""
    runs = [progress.tokens[progress.offsets[index] : progress.offsets[index + 1]] for index in at]
    return replace(
        progress,
        sequence_ids=progress.sequence_ids[at],
        tokens=np.concatenate(runs),
        offsets=offsets_of(np.array([len(run) for run in runs])),
        verified=progress.verified[at],
        max_draft=progress.max_draft[at],
        steps=None if progress.steps is None else progress.steps[at],
    )


def _in_order(batch: DraftBatch, order: np.ndarray) -> DraftBatch:
    """Return the drafts `order`, int64 [B], of a batch."""
    bounds = batch.offsets.astype(np.int64)
    places = np.concatenate([np.arange(bounds[index], bounds[index + 1]) for index in order])
    return DraftBatch(
        tokens=batch.tokens[places],
        parents=batch.parents[places],
        accept_prob=batch.accept_prob[places],
        source=batch.source[places],
        offsets=offsets_of(np.diff(bounds)[order]),
    )
