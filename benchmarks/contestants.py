"""What is replayed: a drafter in one setting, behind a face that lets its calls be timed.

Here are the project's own drafters; `peers.py` has the others.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from benchmarks.traces import Request, Trace
from engine.drafters.ngram import NgramDrafter
from engine.drafters.none import NoDrafter
from ssd.config import DrafterConfig
from ssd.corpus.corpus import Corpus
from ssd.drafter import make_drafter
from ssd.types import DraftBatch, Drafter, Progress, offsets_of

OWN_DRAFTERS = ("ssd", "classic", "ngram", "none")

LEAST_CAPACITY = 1 << 16
"""A small trace needs less; no drafter is used with so little."""


class Draft(NamedTuple):
    """One sequence's draft as plain lists, which a loop over a few nodes reads fastest."""

    tokens: list[int]
    parents: list[int]
    """Index of each token's parent, -1 for a child of the context; parents come first."""
    path_odds: list[float] | None
    """Estimated probability that a token and all before it on its path are accepted; None if the drafter has none."""


@dataclass(eq=False)
class Running:
    """A request being replayed."""

    index: int
    """Its place in the trace, which serves as its id."""
    request: Request
    done: int = 0
    """Output tokens so far."""
    last: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint32))
    """uint32 [n]: what was committed since its last draft."""
    verified: int = 0
    """Tokens of its last draft."""

    def __post_init__(self) -> None:
        self.output: list[int] = self.request.output.tolist()

    @property
    def is_finished(self) -> bool:
        """Whether its whole output is committed."""
        return self.done == len(self.output)

    @property
    def length(self) -> int:
        """Tokens of its prompt and of its output so far."""
        return self.request.prompt_length + self.done

    def advance(self, verified: int, accepted: int) -> None:
        """Commit what was accepted of a draft, and the target's own next token if the output has one."""
        committed = self.request.output[self.done : self.done + accepted + 1]
        self.done += len(committed)
        self.last, self.verified = committed, verified


class Contestant(Protocol):
    """A drafter that is being measured. Every call but `draft` is timed from outside."""

    def start(self, sequence: Running) -> None:
        """Begin a request."""
        ...

    def commit(self, sequence: Running) -> None:
        """Take in `sequence.last`, if that does not happen in `draft`."""
        ...

    def finish(self, sequence: Running) -> None:
        """Take in `sequence.last` and end the request."""
        ...

    def refresh(self) -> None:
        """Make everything so far draftable, if that does not happen by itself."""
        ...

    def draft(self, running: Sequence[Running]) -> tuple[list[Draft], float]:
        """A draft for each, and the seconds that the drafter took for all, without conversions to and fro."""
        ...

    def bytes_per_token(self) -> float | None:
        """Memory of what it remembers, per token remembered; None if it remembers nothing or cannot tell."""
        ...


@dataclass(frozen=True)
class Entry:
    """A drafter in one setting."""

    drafter: str
    setting: str
    build: Callable[[Trace], Contestant]
    k: int = 0
    """Most tokens in a draft."""
    shape: str = "path"
    cost: float | None = None
    """What it was told that a token costs; None if it does not ask, so that one replay serves all costs."""


class Embedded:
    """A drafter with the face of `ssd.types.Drafter`. It takes in what was committed as part of `draft`."""

    def __init__(self, drafter: Drafter, k: int, *, has_odds: bool = False) -> None:
        self._drafter = drafter
        self._k = k
        self._has_odds = has_odds

    def start(self, sequence: Running) -> None:
        """Begin a request."""
        self._drafter.start(sequence.index, sequence.request.prompt)

    def commit(self, sequence: Running) -> None:
        """Nothing: the next draft comes with it."""

    def finish(self, sequence: Running) -> None:
        """End a request."""
        self._drafter.finish(sequence.index, sequence.last, verified=sequence.verified, learn=True)

    def refresh(self) -> None:
        """Nothing to make draftable."""

    def draft(self, running: Sequence[Running]) -> tuple[list[Draft], float]:
        """One call for the whole batch."""
        progress = progress_of(running, self._k)
        began = time.perf_counter()
        batch = self._drafter.draft(progress)
        seconds = time.perf_counter() - began
        return drafts_of(batch, self._has_odds), seconds

    def bytes_per_token(self) -> float | None:
        """Unknown or none."""
        return None


class Remembering(Embedded):
    """A drafter over a corpus that holds the whole trace and is refreshed when the replay says so."""

    def __init__(self, trace: Trace, config: dict[str, Any], *, sessions: bool) -> None:
        """`config`: settings of the drafter besides its capacity. `sessions`: whether it is told which turns belong
        together.
        """
        a_request_more = DrafterConfig.learned_prompt_tokens + 1
        capacity = max(LEAST_CAPACITY, trace.output_tokens + len(trace.requests) * a_request_more)
        settings = DrafterConfig(capacity=capacity, **config)
        self._corpus = Corpus.from_config(settings)
        self._own = make_drafter(settings, corpus=self._corpus)
        self._sessions = sessions
        super().__init__(self._own, settings.max_draft, has_odds=True)

    def start(self, sequence: Running) -> None:
        """Begin a request."""
        if self._sessions:
            session = sequence.request.session
            self._own.start(sequence.index, sequence.request.prompt, session_id=session)
        else:
            super().start(sequence)

    def refresh(self) -> None:
        """Index what was appended."""
        self._corpus.refresh()

    def bytes_per_token(self) -> float | None:
        """Of the corpus, per token in its ring."""
        return self._own.memory_bytes() / max(1, self._corpus.tokens)


def progress_of(running: Sequence[Running], k: int) -> Progress:
    """What happened to the running sequences since their last drafts."""
    runs = [sequence.last for sequence in running]
    return Progress(
        sequence_ids=np.array([sequence.index for sequence in running], np.uint64),
        tokens=np.concatenate(runs),
        offsets=offsets_of(np.array([len(run) for run in runs], np.uint32)),
        verified=np.array([sequence.verified for sequence in running], np.uint32),
        max_draft=np.full(len(running), k, np.uint32),
    )


def drafts_of(batch: DraftBatch, has_odds: bool) -> list[Draft]:
    """The drafts of a batch, sequence by sequence."""
    tokens, parents, odds = batch.tokens.tolist(), batch.parents.tolist(), batch.accept_prob.tolist()
    offsets = batch.offsets.tolist()
    drafts = []
    for left, right in itertools.pairwise(offsets):
        own_parents = parents[left:right]
        path_odds = path_odds_of(own_parents, odds[left:right]) if has_odds else None
        drafts.append(Draft(tokens[left:right], own_parents, path_odds))
    return drafts


def path_odds_of(parents: list[int], odds: list[float]) -> list[float]:
    """Odds of each token given its parent, to odds of its whole path."""
    path_odds: list[float] = []
    for parent, own in zip(parents, odds, strict=True):
        path_odds.append(own * path_odds[parent] if parent >= 0 else own)
    return path_odds


def own_entries(drafter: str, ks: Sequence[int], shapes: Sequence[str], costs: Sequence[float]) -> Iterator[Entry]:
    """Every setting of one of the project's drafters."""
    if drafter == "none":
        yield Entry("none", "", lambda _trace: Embedded(NoDrafter(), 0))
        return
    for k in ks:
        if drafter == "ngram":
            yield Entry("ngram", f"k={k}", lambda _trace, k=k: Embedded(NgramDrafter(), k), k)
        elif drafter == "classic":
            config = {"policy": "classic", "max_draft": k}
            yield Entry("classic", f"k={k}", lambda trace, config=config: Remembering(trace, config, sessions=False), k)
        else:
            for shape in shapes:
                for cost in costs:
                    yield _ssd_entry(k, shape, cost)


def _ssd_entry(k: int, shape: str, cost: float) -> Entry:
    config = {"policy": "suffix", "shape": shape, "max_draft": k, "cost": cost}
    return Entry("ssd", f"{shape} k={k}", lambda trace: Remembering(trace, config, sessions=True), k, shape, cost)
