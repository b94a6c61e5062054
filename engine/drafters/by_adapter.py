"""Drafters for LoRA adapters, so that no request is drafted from the outputs of another adapter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import numpy as np

from ssd.corpus.rollout import Rollout
from ssd.types import DraftBatch, Drafter, Progress

MOST_ADAPTERS = 64
"""Maximum number of drafters, unless more adapters have running sequences. Each takes 2 MB, a thread, and its text."""


class AdapterDrafters(Drafter):
    """One drafter for requests without an adapter and one for each recently used adapter, behind a single interface."""

    def __init__(self, base: Drafter, make: Callable[[str], Drafter], most: int = MOST_ADAPTERS) -> None:
        """make: returns a new drafter of the same kind for an adapter. most: see `MOST_ADAPTERS`."""
        self._base = base
        self._make = make
        self._most = most
        self._by_adapter: OrderedDict[str, Drafter] = OrderedDict()
        """Drafters by the name of the adapter, the least recently used first."""
        self._owners: dict[int, Drafter] = {}
        """The drafter of each running sequence."""
        self.limits, self.corpus = base.limits, base.corpus

    @property
    def is_connected(self) -> bool | None:
        """Whether the remote drafter of requests without an adapter is connected; None if it is not remote."""
        return self._base.is_connected

    def known(self, adapter: str | None) -> Drafter | None:
        """Return the drafter of an adapter; None if it has none at present."""
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
        owner: Any = self._base if adapter is None else self._drafter_of(adapter)
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

    def _drafter_of(self, adapter: str) -> Drafter:
        """Return the drafter of an adapter; a new one may replace the least recently used one without sequences."""
        if adapter not in self._by_adapter:
            if len(self._by_adapter) >= self._most:
                busy = {id(owner) for owner in self._owners.values()}
                idle = next((name for name, each in self._by_adapter.items() if id(each) not in busy), None)
                if idle is not None:
                    # Closing a client waits until the service has received everything that was sent.
                    Thread(target=self._by_adapter.pop(idle).close).start()
            self._by_adapter[adapter] = self._make(adapter)
        self._by_adapter.move_to_end(adapter)
        return self._by_adapter[adapter]

    def _call(self, begin: Callable[[Drafter, Progress], Callable[[], DraftBatch]], progress: Progress) -> DraftBatch:
        """Begin to draft with each drafter, and return the drafts of all in the order of `progress`."""
        owners = [self._owners[sequence_id] for sequence_id in progress.sequence_ids.tolist()]
        distinct = list(dict.fromkeys(owners))
        if len(distinct) == 1:
            return begin(distinct[0], progress)()
        parts = [np.array([index for index, each in enumerate(owners) if each is owner]) for owner in distinct]
        begun = [begin(owner, progress.take(at)) for owner, at in zip(distinct, parts, strict=True)]
        return DraftBatch.concatenate([wait() for wait in begun]).take(np.concatenate(parts).argsort())
