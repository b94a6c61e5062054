"""Drafters for LoRA adapters, so that no request is drafted from the outputs of another adapter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ssd.corpus.rollout import Rollout
from ssd.types import DraftBatch, Drafter, Progress


class AdapterDrafters(Drafter):
    """One drafter for requests without an adapter and one for each adapter that was used, behind a single interface."""

    def __init__(self, base: Drafter, make: Callable[[str], Drafter]) -> None:
        """make: returns a new drafter of the same kind for an adapter."""
        self._base = base
        self._make = make
        self._by_adapter: dict[str, Drafter] = {}
        self._owners: dict[int, Drafter] = {}
        """The drafter of each running sequence."""
        self.limits, self.corpus = base.limits, base.corpus

    @property
    def is_connected(self) -> bool | None:
        """Whether the remote drafter of requests without an adapter is connected; None if it is not remote."""
        return self._base.is_connected

    def known(self, adapter: str | None) -> Drafter | None:
        """Return the drafter of an adapter; None if it was not used yet."""
        return self._base if adapter is None else self._by_adapter.get(adapter)

    def start(
        self,
        sequence_id: int,
        prompt: np.ndarray,
        *,
        hints: np.ndarray | None = None,
        adapter: str | None = None,
        request_id: str | None = None,
        learn: bool = True,
        rollout: Rollout | None = None,
        seed: int | None = None,
    ) -> None:
        """See `ssd.types.Drafter.start`. adapter: name of the request's adapter. The others are as in `Request`."""
        if adapter is not None and adapter not in self._by_adapter:
            self._by_adapter[adapter] = self._make(adapter)
        owner: Any = self.known(adapter)
        owner.start(sequence_id, prompt, hints=hints, request_id=request_id, learn=learn, rollout=rollout, seed=seed)
        self._owners[sequence_id] = owner

    def draft(self, progress: Progress) -> DraftBatch:
        """See `ssd.types.Drafter.draft`."""
        # Requests to other processes are all sent before the first answer is awaited.
        return self._call(lambda drafter, part: drafter.begin_draft(part), progress)

    def draft_after(self, progress: Progress) -> DraftBatch:
        """See `ssd.types.Drafter.draft_after`."""
        return self._call(lambda drafter, part: partial(drafter.draft_after, part), progress)

    def finish(self, sequence_id: int, tokens: np.ndarray, *, verified: int = 0, learn: bool = True) -> None:
        """See `ssd.types.Drafter.finish`."""
        self._owners.pop(sequence_id).finish(sequence_id, tokens, verified=verified, learn=learn)

    def close(self) -> None:
        """See `ssd.types.Drafter.close`."""
        for drafter in (self._base, *self._by_adapter.values()):
            drafter.close()

    def _call(self, begin: Callable[[Drafter, Progress], Callable[[], DraftBatch]], progress: Progress) -> DraftBatch:
        """Begin to draft with each drafter, and return the drafts of all in the order of `progress`."""
        owners = [self._owners[sequence_id] for sequence_id in progress.sequence_ids.tolist()]
        distinct = list(dict.fromkeys(owners))
        if len(distinct) == 1:
            return begin(distinct[0], progress)()
        parts = [np.array([index for index, each in enumerate(owners) if each is owner]) for owner in distinct]
        begun = [begin(owner, progress.take(at)) for owner, at in zip(distinct, parts, strict=True)]
        return DraftBatch.concatenate([wait() for wait in begun]).take(np.concatenate(parts).argsort())
