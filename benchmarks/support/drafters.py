"""Drafters of the replay benchmark behind one interface whose calls can be timed.

This module has the project's own drafters; `benchmarks/support/peers/` has the others.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

import ssd
from benchmarks.traces import Request, Trace
from engine.drafters.model_free.none import NoDrafter
from ssd.baselines.ngram import NgramDrafter
from ssd.config import DrafterConfig
from ssd.types import DraftBatch, Drafter, Progress, offsets_of

OWN_DRAFTERS = ("ssd", "classic", "ngram", "none")

MIN_CAPACITY = 1 << 16
"""Minimum capacity of a corpus; small traces would need less than is used in practice."""


class Draft(NamedTuple):
    """The draft of one sequence as lists, which are faster than arrays for a few nodes."""

    tokens: list[int]
    parents: list[int]
    """Index of each token's parent, -1 for a child of the context; parents precede their children."""
    path_probs: list[float] | None
    """Estimated probability that a token and all before it on its path are accepted; None if the drafter has none."""


@dataclass(eq=False)
class Running:
    """A request being replayed."""

    index: int
    """Index of the request in the trace, used as sequence id."""
    request: Request
    done: int = 0
    """Committed output tokens."""
    last: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint32))
    """uint32 [n]: tokens committed since its last draft."""
    verified: int = 0
    """Number of tokens in its last draft."""

    def __post_init__(self) -> None:
        self.output: list[int] = self.request.output.tolist()

    @property
    def is_finished(self) -> bool:
        """Whether the whole output is committed."""
        return self.done == len(self.output)

    @property
    def length(self) -> int:
        """Number of tokens of the prompt and the output so far."""
        return self.request.prompt_length + self.done

    def advance(self, verified: int, accepted: int) -> None:
        """Commit the accepted tokens of a draft, and the bonus token if the output has one."""
        committed = self.request.output[self.done : self.done + accepted + 1]
        self.done += len(committed)
        self.last, self.verified = committed, verified


class Contestant(Protocol):
    """A measured drafter. The caller times every call but `draft`."""

    def start(self, sequence: Running) -> None:
        """Begin a request."""
        ...

    def commit(self, sequence: Running) -> None:
        """Commit `sequence.last`, unless `draft` does."""
        ...

    def finish(self, sequence: Running) -> None:
        """Commit `sequence.last` and end the request."""
        ...

    def refresh(self) -> None:
        """Index all finished requests, unless the drafter does so by itself."""
        ...

    def draft(self, running: Sequence[Running]) -> tuple[list[Draft], float]:
        """Return a draft for each sequence, and the drafter's seconds without conversions."""
        ...

    def bytes_per_token(self) -> float | None:
        """Return the memory per remembered token; None if nothing is remembered or it is unknown."""
        ...


@dataclass(frozen=True)
class Entry:
    """A drafter in one setting."""

    drafter: str
    setting: str
    build: Callable[[Trace], Contestant]
    k: int = 0
    """Maximum number of tokens in a draft."""
    shape: str = "path"
    cost: float | None = None
    """Configured cost per token; None for a drafter without that setting, for which one replay covers all costs."""


class Embedded:
    """A drafter with the interface `ssd.Drafter`, which commits tokens in `draft`."""

    def __init__(self, drafter: Drafter, k: int, *, has_probs: bool = False) -> None:
        self._drafter = drafter
        self._k = k
        self._has_probs = has_probs

    def start(self, sequence: Running) -> None:
        """Begin a request."""
        self._drafter.start(sequence.index, sequence.request.prompt)

    def commit(self, sequence: Running) -> None:
        """Do nothing; the next `draft` commits the tokens."""

    def finish(self, sequence: Running) -> None:
        """End a request."""
        self._drafter.finish(sequence.index, sequence.last, verified=sequence.verified, learn=True)

    def refresh(self) -> None:
        """Do nothing; there is no index."""

    def draft(self, running: Sequence[Running]) -> tuple[list[Draft], float]:
        """Draft for the whole batch in one call."""
        progress = progress_of(running, self._k)
        began = time.perf_counter()
        batch = self._drafter.draft(progress)
        seconds = time.perf_counter() - began
        return drafts_of(batch, self._has_probs), seconds

    def bytes_per_token(self) -> float | None:
        """Return None."""
        return None


class Remembering(Embedded):
    """A drafter over a corpus that holds the whole trace and is refreshed by the replay."""

    def __init__(self, trace: Trace, config: dict[str, Any], *, is_classic: bool = False) -> None:
        """Make the drafter; config: its settings without the capacity. A classic drafter gets no session ids."""
        # The kernels take seconds to import.
        from ssd.baselines.classic import ClassicDrafter
        from ssd.drafter import SuffixDrafter

        learned = DrafterConfig.learned_prompt_tokens + 1
        capacity = max(MIN_CAPACITY, trace.output_tokens + len(trace.requests) * learned)
        settings = DrafterConfig(capacity=capacity, **config)
        self._corpus = ssd.Corpus.from_config(settings)
        self._own = (ClassicDrafter if is_classic else SuffixDrafter)(settings, corpus=self._corpus)
        self._sessions = not is_classic
        super().__init__(self._own, settings.max_draft, has_probs=True)

    def start(self, sequence: Running) -> None:
        """Begin a request."""
        if self._sessions:
            session = sequence.request.session
            self._own.start(sequence.index, sequence.request.prompt, session_id=session)
        else:
            super().start(sequence)

    def refresh(self) -> None:
        """Index the appended requests."""
        self._corpus.refresh()

    def bytes_per_token(self) -> float | None:
        """Return the drafter's memory per token of the corpus."""
        return self._own.memory_bytes() / max(1, self._corpus.tokens)


def progress_of(running: Sequence[Running], k: int) -> Progress:
    """Return the progress of the running sequences since their last drafts."""
    runs = [sequence.last for sequence in running]
    return Progress(
        sequence_ids=np.array([sequence.index for sequence in running], np.uint64),
        tokens=np.concatenate(runs),
        offsets=offsets_of(np.array([len(run) for run in runs], np.uint32)),
        verified=np.array([sequence.verified for sequence in running], np.uint32),
        max_draft=np.full(len(running), k, np.uint32),
    )


def drafts_of(batch: DraftBatch, has_probs: bool) -> list[Draft]:
    """Split a batch into the drafts of its sequences."""
    tokens, parents, probs = batch.tokens.tolist(), batch.parents.tolist(), batch.accept_prob.tolist()
    offsets = batch.offsets.tolist()
    drafts = []
    for left, right in itertools.pairwise(offsets):
        own_parents = parents[left:right]
        path_probs = path_probs_of(own_parents, probs[left:right]) if has_probs else None
        drafts.append(Draft(tokens[left:right], own_parents, path_probs))
    return drafts


def path_probs_of(parents: list[int], probs: list[float]) -> list[float]:
    """Multiply probabilities given the parent to path probabilities."""
    path_probs: list[float] = []
    for parent, own in zip(parents, probs, strict=True):
        path_probs.append(own * path_probs[parent] if parent >= 0 else own)
    return path_probs


def own_entries(
    drafter: str,
    ks: Sequence[int],
    shapes: Sequence[str],
    costs: Sequence[float],
) -> Iterator[Entry]:
    """Return the settings of one of the project's drafters."""
    if drafter == "none":
        yield Entry("none", "", lambda _trace: Embedded(NoDrafter(), 0))
        return
    for k in ks:
        if drafter == "ngram":
            yield Entry("ngram", f"k={k}", lambda _trace, k=k: Embedded(NgramDrafter(), k), k)
        elif drafter == "classic":
            yield _classic_entry(k)
        else:
            for shape in shapes:
                for cost in costs:
                    yield _ssd_entry(k, shape, cost)


def _classic_entry(k: int) -> Entry:
    return Entry("classic", f"k={k}", lambda trace: Remembering(trace, {"max_draft": k}, is_classic=True), k)


def _ssd_entry(k: int, shape: str, cost: float) -> Entry:
    config = {"draft_shape": shape, "max_draft": k, "cost": cost}
    return Entry("ssd", f"{shape} k={k}", lambda trace: Remembering(trace, config), k, shape, cost)
