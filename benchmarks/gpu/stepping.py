"""Steps of an engine in which every sequence produces, timed one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np

from benchmarks.gpu.bench import DRAFT, PROMPT_STEP_TOKENS, Bench
from benchmarks.gpu.timeline import Interval, record
from engine.config import DraftShape
from engine.engine import Engine, StepReport
from engine.scheduling.request import Request, SamplingParams
from ssd.types import DraftBatch, Drafter, Progress, Source, offsets_of

WARM_STEPS = 5


def said(places: np.ndarray, vocab_size: int) -> np.ndarray:
    """What all outputs are made of, whatever the model says: each place has another token, so nothing of them is found
    earlier in the text. places: of tokens within an output; uint32 like those.
    """
    return (places % vocab_size).astype(np.uint32)


class FixedDrafter:
    """Drafts random tokens in one shape for everyone, of which none fits."""

    def __init__(self, parents: np.ndarray, vocab_size: int, odds: float = 0.9, right: int = 0) -> None:
        """parents: int32 [k]. odds: that each token is promised to fit with, given its parent. right: how many tokens,
        the first ones, are those that come.
        """
        self._parents = parents
        self._right = right
        self._vocab_size = vocab_size
        self._odds = odds
        self._random = np.random.default_rng(0)
        self._produced: Counter[int] = Counter()

    def start(self, sequence_id: int, prompt: np.ndarray) -> None:
        """Nothing to note."""

    def draft(self, progress: Progress) -> DraftBatch:
        """The same shape for every sequence, cut to what it can use."""
        lengths = np.minimum(progress.max_draft, len(self._parents)).astype(np.uint32)
        parents = [self._parents[:length] for length in lengths.tolist()]
        tokens, offsets = int(lengths.sum()), offsets_of(lengths)
        ids = progress.sequence_ids.tolist()
        for sequence_id, count in zip(ids, np.diff(progress.offsets).tolist(), strict=True):
            self._produced[sequence_id] += count
        within = np.arange(tokens) - np.repeat(offsets[:-1].astype(np.int64), lengths)
        places = within + np.repeat([self._produced[sequence_id] for sequence_id in ids], lengths)
        away = np.where(within < self._right, 0, self._random.integers(1, self._vocab_size, tokens))
        return DraftBatch(
            tokens=said(places + away, self._vocab_size),
            parents=np.concatenate([np.empty(0, np.int32), *parents]),
            accept_prob=np.full(tokens, self._odds, np.float32),
            source=np.full(tokens, Source.CORPUS, np.uint8),
            offsets=offsets,
        )

    def finish(self, sequence_id: int, tokens: np.ndarray, *, verified: int = 0, learn: bool = True) -> None:
        """Nothing to note."""

    def close(self) -> None:
        """Nothing to release."""


def path(length: int) -> np.ndarray:
    """Parents of a draft without branches, int32 [length]."""
    return np.arange(-1, length - 1, dtype=np.int32)


def binary_tree(nodes: int) -> np.ndarray:
    """Parents of a tree in which every token has two successors, int32 [nodes]."""
    return ((np.arange(nodes, dtype=np.int32) + 1) // 2 - 1).astype(np.int32)


def random_requests(bench: Bench, count: int, prompt_tokens: int, output_tokens: int, seed: int = 0) -> list[Request]:
    """Prompts of random tokens that have no beginning in common, and outputs of a fixed length, see `said`."""
    random = np.random.default_rng(seed)
    sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    output = said(np.arange(output_tokens), bench.config.vocab_size)
    return [
        Request(random.integers(0, bench.config.vocab_size, prompt_tokens, np.uint32), sampling, recorded=output)
        for _ in range(count)
    ]


class Stream:
    """An engine whose sequences have all run their prompts, ready to be stepped."""

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self._engine = engine
        self._count = len(requests)
        for request in requests:
            engine.add(request)
        while len(engine.step().results) < self._count:
            pass
        for _ in range(WARM_STEPS):
            self.step()

    def step(self) -> StepReport:
        """One step; raises RuntimeError if not every sequence produced in it, as then it is no step to be timed."""
        report = self._engine.step()
        if len(report.results) != self._count:
            raise RuntimeError(f"{len(report.results)} of {self._count} sequences produced: some ended or waited")
        return report

    def timed(self, steps: int) -> tuple[list[float], list[StepReport]]:
        """Seconds of each step, from the end of the one before, and what it did."""
        # The pipelined loop has begun a step that ended long ago, if others ran meanwhile.
        self.step()
        seconds, reports = [], []
        last = perf_counter()
        for _ in range(steps):
            reports.append(self.step())
            now = perf_counter()
            seconds.append(now - last)
            last = now
        return seconds, reports

    def recorded(self, steps: int) -> list[Interval]:
        """The kernels of so many steps."""
        return record(lambda: [self.step() for _ in range(steps)])


@dataclass(frozen=True)
class Timed:
    """What came of one drafter's steps."""

    rounds: list[list[float]]
    """Seconds of each step, a list a round."""
    reports: list[StepReport]
    kernels: list[Interval]
    """Of further steps; none without a GPU."""

    @property
    def medians(self) -> list[float]:
        """Seconds of a step, of each round."""
        return [median(seconds) for seconds in self.rounds]


def time_steps(
    bench: Bench,
    drafters: Mapping[str, Drafter],
    sequences: int,
    context: int,
    *,
    max_draft: int = DRAFT,
    shape: DraftShape = "path",
    recorded: int = 0,
) -> dict[str, Timed]:
    """Steps around a context of so many tokens with each drafter, in turns of `bench.scale.steps`, each with an engine
    that lives through all rounds; at the end, `recorded` more with the profiler.
    """
    # Those whose prompts run first produce while the others' prompts run.
    prompt_steps = -(-sequences * context // PROMPT_STEP_TOKENS)
    most = prompt_steps + WARM_STEPS + bench.scale.rounds * (1 + bench.scale.steps) + recorded + 2
    # Behind the last step there is still room for a draft, and for one that reaches beyond the step under way.
    longest = most + 2 * max_draft
    requests = random_requests(bench, sequences, max(1, context - most // 2), longest)
    with ExitStack() as stack:
        streams = {}
        for name, drafter in drafters.items():
            engine = bench.engine(drafter, sequences, context + longest, max_draft=max_draft, shape=shape)
            stack.enter_context(closing(engine))
            streams[name] = Stream(engine, requests)
        found = {name: Timed([], [], []) for name in drafters}
        for _ in range(bench.scale.rounds):
            for name, stream in streams.items():
                seconds, reports = stream.timed(bench.scale.steps)
                found[name].rounds.append(seconds)
                found[name].reports.extend(reports)
        if recorded and bench.on_gpu:
            for name, stream in streams.items():
                found[name].kernels.extend(stream.recorded(recorded))
    return found


def ratios(timed: Timed, other: Timed) -> list[float]:
    """Of a step's time to the other's, within each round."""
    return [own / its for own, its in zip(timed.medians, other.medians, strict=True)]
