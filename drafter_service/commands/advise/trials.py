"""The replays that advice is based on, run in several processes."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, Queue

import numpy as np

from drafter_service.commands.advise.arctic import ArcticDrafter
from drafter_service.commands.advise.provenance import Origins, Tracer
from drafter_service.commands.advise.replay import Replay, replay
from drafter_service.commands.advise.traffic import Traffic
from ssd.base import CorpusDrafter
from ssd.baselines.ngram import NgramDrafter
from ssd.config import DrafterConfig, DraftShape
from ssd.corpus.corpus import Corpus
from ssd.corpus.ring import MIN_CAPACITY
from ssd.errors import UserError
from ssd.hardware.processors import usable_processors
from ssd.types import DraftBatch, Drafter, Progress

POLL_S = 0.1
"""Interval at which progress is reported."""
REPORTED_TOKENS = 10_000
"""Output tokens after which a process reports progress."""
SAMPLE_TOKENS = 200_000
"""Output tokens of a trial that compares settings; only the last trial replays the whole log."""
INLINE_TOKENS = 500_000
"""Logs up to this size are replayed in this process, because starting others takes longer."""


@dataclass(frozen=True)
class Trial:
    """One replay."""

    drafter: str
    """`ssd`, `classic`, `ngram` or `arctic`."""
    draft_shape: DraftShape
    max_draft: int
    concurrency: int
    """Largest number of requests that run at once; 0: as many as in the log."""
    cost: float
    """Cost of verifying one more token, as a fraction of a step."""
    capacity: int
    """Tokens that the corpus holds."""
    is_whole: bool = False
    """Whether the whole log is replayed, and accepted drafts are traced to their sources."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """Result of a trial."""

    trial: Trial
    replay: Replay
    draft_ms: float
    """Mean time in which the drafter answers a step, for all its sequences together."""
    prompt_tokens: float
    """Tokens of prompts that the target computes per output token."""
    origins: Origins | None = None


class TimedDrafter:
    """A drafter whose answers are timed."""

    def __init__(self, inner: Drafter, tracer: Tracer | None, corpus: Corpus | None) -> None:
        self._inner = inner
        self._tracer = tracer
        self._corpus = corpus
        self.seconds = 0.0
        self.calls = 0

    def start(self, sequence_id: int, prompt: np.ndarray, session: int) -> None:
        """Begin a sequence; session: -1 for none."""
        if session >= 0 and isinstance(self._inner, CorpusDrafter):
            self._inner.start(sequence_id, prompt, session_id=session)
        else:
            self._inner.start(sequence_id, prompt)

    def draft(self, progress: Progress) -> DraftBatch:
        """Return the drafts of the other drafter, which may also come from the outputs of running requests so far."""
        if self._corpus is not None:
            self._corpus.refresh()
        began = time.perf_counter()
        drafts = self._inner.draft(progress)
        self.seconds += time.perf_counter() - began
        self.calls += 1
        return drafts

    def finish(self, sequence_id: int, tokens: np.ndarray, verified: int) -> None:
        """End a sequence, and make its output draftable."""
        self._inner.finish(sequence_id, tokens, verified=verified, learn=True)
        if self._corpus is not None:
            self._corpus.refresh()
        if self._tracer is not None:
            self._tracer.finish(sequence_id)

    def close(self) -> None:
        """Close the other drafter."""
        self._inner.close()


def run_trial(traffic: Traffic, trial: Trial, watch: Callable[[int], None]) -> Outcome:
    """Run one trial; `watch` is called with numbers of replayed output tokens."""
    if not trial.is_whole:
        traffic = traffic.first(SAMPLE_TOKENS)
    corpus = None
    inner: Drafter
    if trial.drafter == "ngram":
        inner = NgramDrafter()
    elif trial.drafter == "arctic":
        inner = ArcticDrafter(trial.cost)
    else:
        config = DrafterConfig(
            capacity=trial.capacity,
            draft_shape=trial.draft_shape,
            max_draft=trial.max_draft,
            cost=trial.cost,
        )
        corpus = Corpus.from_config(config)
        inner = _corpus_drafter(trial.drafter, config, corpus)
    tracer = Tracer(traffic, corpus) if trial.is_whole and corpus is not None else None
    drafter = TimedDrafter(inner, tracer, corpus)
    recorded = traffic.concurrency()
    concurrency = trial.concurrency or (1 if recorded is None else recorded)
    accept = None if tracer is None else tracer.accept
    result = replay(
        traffic,
        drafter,
        concurrency=concurrency,
        max_draft=trial.max_draft,
        cost=trial.cost,
        accept=accept,
        watch=watch,
    )
    drafter.close()
    draft_ms = 1e3 * drafter.seconds / max(1, drafter.calls)
    prompt_tokens = traffic.uncached_prompt_tokens() / max(1, int(traffic.output_lengths.sum()))
    return Outcome(trial, result, draft_ms, prompt_tokens, None if tracer is None else tracer.origins)


def _corpus_drafter(name: str, config: DrafterConfig, corpus: Corpus) -> CorpusDrafter:
    if name == "classic":
        from ssd.baselines.classic import ClassicDrafter

        return ClassicDrafter(config, corpus=corpus)
    from ssd.drafter import SuffixDrafter

    return SuffixDrafter(config, corpus=corpus)


def needed_capacity(traffic: Traffic, most: int) -> int:
    """Return the capacity in which all outputs with their prefixes fit, at most `most`."""
    room = int(traffic.output_lengths.sum()) + len(traffic) * (DrafterConfig.learned_prompt_tokens + 1)
    return max(MIN_CAPACITY, min(most, room))


def size_of(traffic: Traffic, trials: Sequence[Trial]) -> int:
    """Return the number of output tokens that trials replay."""
    whole = int(traffic.output_lengths.sum())
    sample = int(traffic.first(SAMPLE_TOKENS).output_lengths.sum())
    return sum(whole if trial.is_whole else sample for trial in trials)


def run_trials(traffic: Traffic, path: Path, trials: Sequence[Trial], watch: Callable[[int], None]) -> list[Outcome]:
    """Run trials, as many at a time as there are cores; path: the file with the tokens of the traffic.

    Raises UserError if the system ends one of the processes.
    """
    workers = min(len(trials), len(usable_processors()))
    if workers == 1 or size_of(traffic, trials) <= INLINE_TOKENS:
        return [run_trial(traffic, trial, watch) for trial in trials]
    context = multiprocessing.get_context("spawn")
    without_tokens = replace(traffic, tokens=np.empty(0, np.uint32))
    # Ctrl-C must end the processes. With Python's own handler each would go on with the next trial.
    end_on_interrupt = signal.SIGINT, signal.SIG_DFL
    with context.Manager() as manager, ProcessPoolExecutor(workers, context, signal.signal, end_on_interrupt) as pool:
        done: Queue[int] = manager.Queue()
        futures = [pool.submit(_run, without_tokens, path, trial, done) for trial in trials]
        try:
            while not all(future.done() for future in futures):
                with suppress(Empty):
                    watch(done.get(timeout=POLL_S))
            return [future.result() for future in futures]
        except BrokenProcessPool:
            raise UserError("the system ended a replay, perhaps for lack of memory; give a part of the log") from None
        finally:
            pool.shutdown(cancel_futures=True)


def _run(traffic: Traffic, path: Path, trial: Trial, done: Queue[int]) -> Outcome:
    """Run a trial in a process of the pool."""
    waiting = 0

    def watch(tokens: int) -> None:
        nonlocal waiting
        waiting += tokens
        if waiting >= REPORTED_TOKENS:
            done.put(waiting)
            waiting = 0

    outcome = run_trial(replace(traffic, tokens=np.memmap(path, np.uint32, "r")), trial, watch)
    done.put(waiting)
    return outcome
