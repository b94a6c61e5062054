"""The replays that advice is based on."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import NamedTuple

import numpy as np

from drafter_service.commands.advise.arctic import ArcticDrafter, settings_for
from ssd.baselines.classic import ClassicDrafter
from ssd.baselines.ngram import NgramDrafter
from ssd.budget.cost_profile import CostProfile
from ssd.budget.curve import PaddingOf, StepCurve, usual_knots
from ssd.budget.padding import NO_PADDING, Padding
from ssd.config import DrafterConfig, DraftShape
from ssd.corpus.corpus import Corpus
from ssd.corpus.ring import MIN_CAPACITY
from ssd.corpus.search import longest_match
from ssd.drafter import SuffixDrafter
from ssd.replay import Counts, Recording, Step, replay
from ssd.types import Drafter, Source

EVERY = 8
"""Accepted drafts per one that is traced."""
CONTEXT = 32
"""Tokens up to the last accepted one that are searched for."""


class Origin(NamedTuple):
    """Origin of a traced draft."""

    accepted: int
    """Number of accepted tokens."""
    age: int
    """Tokens that were remembered after the newest occurrence that was found; -1 if the text is not from the corpus."""
    request: int
    """The request that was drafted for."""
    source: int
    """The request whose text it was; -1 if the text is not from the corpus."""


class Tracer:
    """Traces accepted drafts to the requests in the corpus that contain them."""

    def __init__(self, recording: Recording, corpus: Corpus) -> None:
        self.origins: list[Origin] = []
        """Origins of one in `EVERY` accepted drafts, without those from requests that were still running."""
        self._recording = recording
        self._corpus = corpus
        self._ends: list[int] = []
        """Number of tokens in the corpus after each remembered request."""
        self._finished: list[int] = []
        self._count = 0

    def remember(self, tokens: np.ndarray, request_id: str | None, tag: int) -> None:
        """Append a request to the corpus; for the argument `remember` of its drafter."""
        self._corpus.append(tokens, request_id, tag=tag)
        separator = 1
        self._ends.append((self._ends[-1] if self._ends else 0) + len(tokens) + separator)

    def observe(self, step: Step) -> None:
        """Record the accepted drafts of a step of the replay, and which requests end with it."""
        rows = np.flatnonzero(step.accepted)
        accepted = step.accepted[rows]
        ends = step.ends[rows] - step.committed[rows] + accepted
        is_shared = step.drafts.source[step.drafts.offsets[rows] + step.last_accepted[rows]] != Source.LOCAL
        columns = (step.requests[rows], ends, accepted, is_shared)
        for each in zip(*(column.tolist() for column in columns), strict=True):
            self._count += 1
            if self._count % EVERY == 0:
                self._trace(*each)
        self._finished += step.requests[step.ended].tolist()

    def _trace(self, request: int, end: int, accepted: int, is_shared: bool) -> None:
        """Record the origin of an accepted draft.

        end: index in `Recording.tokens` after its last accepted token. is_shared: whether that token came from another
        request's text.
        """
        age = source = -1
        if is_shared:
            start = max(int(self._recording.starts[request]), end - max(CONTEXT, accepted + 1))
            text = np.asarray(self._recording.tokens[start:end])
            match = longest_match(self._corpus.view, text, self._corpus.depth)
            age = match.age if match.length > min(accepted, self._corpus.depth - 1) else -1
            source = self._request_at(self._corpus.indexed - age) if age >= 0 else -1
            if source < 0:  # Its user is unknown, but it is not the request's own text either.
                return
        self.origins.append(Origin(accepted, age, request, source))

    def _request_at(self, position: int) -> int:
        place = bisect_right(self._ends, position)
        return self._finished[place] if place < len(self._ends) else -1


# --- Durations

PAGE_SIZE = 16
"""Tokens that a prefix cache keeps or drops together, as in vLLM."""
SAMPLE_TOKENS = 100_000
"""Output tokens of a trial that compares settings; only the last trial replays the whole log."""
HOST_MS, HOST_MS_PER_SEQUENCE = 1.4, 0.057
"""Time for which the device waits for the host in a step with drafts: to read results, draft, schedule and launch.
Without drafts the host works while the device does. Fitted to serving on an H200 (docs/operations.md)."""


@dataclass(frozen=True)
class Trial:
    """One replay."""

    drafter: str
    """`ssd`, `classic`, `ngram` or `arctic`."""
    draft_shape: DraftShape
    max_draft: int
    concurrency: int
    """Largest number of requests that run at once; 0: as many as in the log."""
    capacity: int
    """Tokens that the corpus holds."""
    is_padded: bool = False
    """Whether the engine pads the draft of each sequence to `max_draft`."""
    is_whole: bool = False
    """Whether the whole log is replayed, and accepted drafts are traced to their sources."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """Result of a trial."""

    trial: Trial
    counts: Counts
    speedup: float
    """Time of a service without drafts, divided by that with these drafts."""
    origins: Sequence[Origin] = ()
    """Origins of accepted drafts; empty unless the whole log was replayed."""

    @property
    def output_tokens(self) -> int:
        """Number of output tokens that were replayed. A longer part of a log has more tokens per step."""
        return int(self.counts.tokens.sum())


def run_trial(recording: Recording, profile: CostProfile, trial: Trial, watch: Callable[[int], None]) -> Outcome:
    """Run one trial on an engine with the steps of a profile; `watch` is called with numbers of replayed tokens."""
    if not trial.is_whole:
        recording = recording.first(SAMPLE_TOKENS)
    recorded = recording.concurrency()
    load = concurrency_of(recording, trial.concurrency)
    curve = curve_at(profile, load, Padding(lengths=(trial.max_draft,)) if trial.is_padded else NO_PADDING)
    drafter, tracer = _drafter_of(trial, curve, recording)

    def observe(step: Step) -> None:
        if tracer is not None:
            tracer.observe(step)
        watch(int(step.committed.sum()))

    counts = replay(
        recording,
        drafter,
        curve=curve,
        concurrency=trial.concurrency or (1 if recorded is None else recorded),
        max_draft=trial.max_draft,
        clock=time.thread_time,  # Other processes on this machine do not change the advice.
        observe=observe,
    )
    drafter.close()
    # Drafts do not change the time of prompts, nor how many of them a prefix cache has.
    prompts = uncached_prompt_tokens(recording) * profile.prompt_token_ms / 1e3
    plain = recording.output_tokens * float(profile.curve().seconds(load, load)) / load
    speedup = (plain + prompts) / (counts.seconds + counts.draft_s + prompts)
    return Outcome(trial, counts, speedup, () if tracer is None else tracer.origins)


def uncached_prompt_tokens(recording: Recording) -> int:
    """Return the number of prompt tokens that a target computes if its prefix cache keeps all earlier requests."""
    tokens, cached, missing = np.asarray(recording.tokens), set[int](), 0
    for request in recording.in_order().tolist():
        pages = _page_hashes(tokens[recording.starts[request] : recording.starts[request + 1]])
        found = sum(1 for _ in takewhile(cached.__contains__, pages))
        missing += max(0, int(recording.prompt_lengths[request]) - found * PAGE_SIZE)
        cached.update(pages)
    return missing


def _page_hashes(tokens: np.ndarray) -> list[int]:
    """Return a hash for each full page of a text; it identifies the text up to the end of the page."""
    pages = (tokens[at : at + PAGE_SIZE].tobytes() for at in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE))
    return list(accumulate(pages, lambda before, page: hash((before, page)), initial=0))[1:]


def concurrency_of(recording: Recording, given: int | None) -> int:
    """Return the number of requests at once for which to advise: the given one, that of the log, or 1."""
    recorded = recording.concurrency()
    return given or (1 if recorded is None else max(1, round(float(recorded.mean()))))


def host_ms(sequences: int) -> float:
    """Return the milliseconds for which the device waits for the host in a step with drafts."""
    return HOST_MS + HOST_MS_PER_SEQUENCE * sequences


def curve_at(profile: CostProfile, load: int, padding: PaddingOf = NO_PADDING) -> StepCurve:
    """Return the curve of an engine that always runs `load` sequences, by which steps of fewer are counted, too.

    A step of b sequences counts as b / load of a step of `load` sequences that draft as much each, the wait for the
    host included. So the beginning and the end of a log, when few requests run, do not count as if the engine were
    empty, and no speed-up exceeds the tokens per step.
    """
    full, knots = profile.curve(), usual_knots()

    def share(sequences: int) -> np.ndarray:
        part = sequences / load
        seconds: np.ndarray = part * (full.seconds(knots / part, load) + host_ms(load) / 1e3)
        return seconds

    return StepCurve(knots, share, padding)


def _drafter_of(trial: Trial, curve: StepCurve, recording: Recording) -> tuple[Drafter, Tracer | None]:
    """Return the drafter of a trial, and what traces its drafts if the whole log is replayed."""
    if trial.drafter == "ngram":
        return NgramDrafter(), None
    if trial.drafter == "arctic":
        count = max(1, trial.concurrency)
        one, two = curve.seconds(np.array([count, 2 * count]), count)
        return ArcticDrafter(*settings_for(two / one - 1)), None
    config = DrafterConfig(capacity=trial.capacity, draft_shape=trial.draft_shape, max_draft=trial.max_draft)
    corpus = Corpus.from_config(config)
    if trial.drafter == "classic":
        return ClassicDrafter(config, corpus=corpus), None
    if not trial.is_whole:
        return SuffixDrafter(config, corpus=corpus, curve=curve), None
    tracer = Tracer(recording, corpus)
    return SuffixDrafter(config, corpus=corpus, curve=curve, remember=tracer.remember), tracer


def needed_capacity(recording: Recording, most: int) -> int:
    """Return the capacity in which all outputs with their prefixes fit, at most `most`."""
    room = recording.output_tokens + len(recording) * (DrafterConfig.learned_prompt_tokens + 1)
    return max(MIN_CAPACITY, min(most, room))


def size_of(recording: Recording, trials: Sequence[Trial]) -> int:
    """Return the number of output tokens that trials replay."""
    whole = recording.output_tokens
    sample = min(whole, SAMPLE_TOKENS)
    return sum(whole if trial.is_whole else sample for trial in trials)
