"""Replay a trace with a drafter of the replay benchmark, and count and time what it does."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import TracebackType
from typing import Any

import numpy as np

from benchmarks.support.drafters import Candidate
from benchmarks.support.peers.arctic import Arctic
from benchmarks.support.scores import COLD_SHARE, LATE_EPOCH, Tally
from benchmarks.traces import Trace
from drafter_service.commands.advise.arctic import batch_of
from drafter_service.commands.advise.replay import TimedDrafter, steps_of
from drafter_service.commands.advise.running import Running
from drafter_service.commands.advise.traffic import Traffic
from ssd.base import CorpusDrafter
from ssd.baselines.classic import ClassicDrafter
from ssd.corpus.rollout import Rollout
from ssd.types import DraftBatch, Progress


class Stopwatch:
    """Sums the seconds spent in its `with` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += time.perf_counter() - self._began


class MeasuredDrafter(TimedDrafter):
    """A drafter whose other calls are timed, too."""

    def __init__(self, inner: Any, grouped: Traffic | None = None) -> None:
        """grouped: requests whose group and version the drafter is given if its `start` has these arguments."""
        super().__init__(inner)
        self._taken = inspect.signature(inner.start).parameters
        self._grouped = grouped if {"group", "rollout"} & self._taken.keys() else None
        self.inserting = Stopwatch()

    def start(self, sequence_id: int, prompt: np.ndarray, session: int, **options: Any) -> None:
        """Begin a sequence; the classic drafter gets no session ids."""
        if self._grouped is not None:
            group, version = (int(of[sequence_id]) for of in (self._grouped.groups, self._grouped.versions))
            if "rollout" in self._taken:
                options["rollout"] = None if group < 0 else Rollout(str(group), max(0, version))
            else:
                options |= {"group": None if group < 0 else str(group), "version": None if version < 0 else version}
        with self.inserting:
            super().start(sequence_id, prompt, -1 if isinstance(self.inner, ClassicDrafter) else session, **options)

    def commit(self, running: Running) -> None:
        """Commit the tokens of a step, unless the next draft does."""

    def finish(self, sequence_id: int, tokens: np.ndarray, verified: int) -> None:
        """End a sequence."""
        with self.inserting:
            super().finish(sequence_id, tokens, verified)

    def refresh(self) -> None:
        """Index all text."""
        with self.inserting:
            super().refresh()

    def path_probs(self, drafts: DraftBatch) -> list[float] | None:
        """Return the estimated probability that each token of the last drafts and all before it on its path are
        accepted; None if the drafter has none.
        """
        if not isinstance(self.inner, CorpusDrafter):
            return None
        parents, probs, offsets = drafts.parents.tolist(), drafts.accept_prob.tolist(), drafts.offsets.tolist()
        path_probs: list[float] = []
        for left, right in pairwise(offsets):
            for node in range(left, right):
                before = path_probs[left + parents[node]] if parents[node] >= 0 else 1.0
                path_probs.append(probs[node] * before)
        return path_probs

    def bytes_per_token(self) -> float | None:
        """Return the memory per remembered token; None if nothing is remembered or it is unknown."""
        if not isinstance(self.inner, CorpusDrafter):
            return None
        return self.inner.memory_bytes() / max(1, self.inner.corpus.tokens)


class MeasuredPeer(MeasuredDrafter):
    """A drafter of another project. Its drafts commit no tokens, and their conversion to arrays is not timed."""

    _answers: list[Any]

    def commit(self, running: Running) -> None:
        """Commit the tokens of a step."""
        last = [running.last(row) for row in range(len(running))]
        with self.inserting:
            for request, tokens in zip(running.requests.tolist(), last, strict=True):
                self.inner.commit(request, tokens)

    def draft(self, progress: Progress) -> DraftBatch:
        """Draft for each sequence in a separate call."""
        limits = list(zip(progress.sequence_ids.tolist(), progress.max_draft.tolist(), strict=True))
        began = time.perf_counter()
        self._answers = [self.inner.speculate(sequence_id, limit) for sequence_id, limit in limits]
        self.draft_s += time.perf_counter() - began
        return batch_of(self._answers)

    def finish(self, sequence_id: int, tokens: np.ndarray, verified: int) -> None:  # noqa: ARG002
        """End a sequence, whose last tokens are committed."""
        with self.inserting:
            self.inner.finish(sequence_id, tokens[:0])

    def path_probs(self, drafts: DraftBatch) -> list[float] | None:  # noqa: ARG002
        """Return the probabilities that the package gives; None for other peers."""
        if not isinstance(self.inner, Arctic):
            return None
        return [prob for answer in self._answers for prob in answer.probs]

    def bytes_per_token(self) -> float | None:
        """Return the memory of Arctic's tree; that of Python objects says nothing about the originals."""
        return self.inner.bytes_per_token() if isinstance(self.inner, Arctic) else None


def replay(
    candidate: Candidate,
    trace: Trace,
    concurrency: int | str = 1,
    *,
    times: int = 1,
    groups: bool = False,
    drafter: Any = None,
    watch: Callable[[int], None] = lambda _tokens: None,
) -> Tally:
    """Replay a trace with a new drafter, `concurrency` requests at a time or by version (see `BY_VERSION`).

    times: number of replays with the same drafter; the tally is that of the last one. groups: whether the drafter is
    given groups and versions. drafter: instead of a new one. watch: called with numbers of replayed output tokens.
    """
    traffic = trace.traffic(times)
    inner = drafter or candidate.build(traffic)
    for requests in np.split(np.arange(len(traffic)), times):
        TimedDrafter(inner).refresh()
        measured = _measured(inner, traffic if groups else None)
        tally = _count(measured, traffic, requests, concurrency, candidate.k, watch)
    return tally


def _measured(inner: Any, grouped: Traffic | None = None) -> MeasuredDrafter:
    return (MeasuredPeer if hasattr(inner, "speculate") else MeasuredDrafter)(inner, grouped)


def running_steps(candidate: Candidate, traffic: Traffic, concurrency: int) -> Iterator[Running]:
    """Replay traffic with a new drafter, and yield the running requests after each step."""
    inner = candidate.build(traffic)
    drafter = _measured(inner)
    for running in steps_of(traffic, np.arange(len(traffic)), drafter, concurrency=concurrency, max_draft=candidate.k):
        yield running
        drafter.commit(running)


def _count(
    drafter: MeasuredDrafter,
    traffic: Traffic,
    requests: np.ndarray,
    concurrency: int | str,
    max_draft: int,
    watch: Callable[[int], None],
) -> Tally:
    lengths, epochs = traffic.output_lengths, traffic.epochs()
    is_late = np.zeros(len(traffic), bool) if epochs is None else epochs >= LATE_EPOCH
    tally = Tally(np.zeros(len(traffic), np.int64), np.zeros(len(traffic), np.int64))
    cold_until, drafted_s = COLD_SHARE * int(lengths[requests].sum()), 0.0
    for running in _steps(traffic, requests, drafter, concurrency, max_draft):
        tally.add(running, drafter.path_probs(running.drafts), is_late, is_cold=tally.output_tokens < cold_until)
        tally.draft_s += [(drafter.draft_s - drafted_s) / len(running)] * len(running)
        drafted_s = drafter.draft_s
        if running.ended.any():
            watch(int(lengths[running.requests[running.ended]].sum()))
        drafter.commit(running)
    tally.prompt_tokens = int(traffic.prompt_lengths[requests].sum())
    tally.insert_s, tally.bytes_per_token = drafter.inserting.seconds, drafter.bytes_per_token()
    return tally


def _steps(
    traffic: Traffic, requests: np.ndarray, drafter: MeasuredDrafter, concurrency: int | str, max_draft: int
) -> Iterator[Running]:
    """Yield the running requests after each step, see `steps_of`."""
    if not isinstance(concurrency, str):
        yield from steps_of(traffic, requests, drafter, concurrency=concurrency, max_draft=max_draft)
        return
    versions = traffic.versions[requests]
    for version in np.unique(versions):
        batch = requests[versions == version]
        yield from steps_of(traffic, batch, drafter, concurrency=len(batch), max_draft=max_draft)
