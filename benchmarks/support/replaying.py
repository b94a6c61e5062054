"""Replays of recordings with settings of drafters, and their figures."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.support import ROOT, Row
from ssd.baselines.ngram import NgramDrafter
from ssd.baselines.none import NoDrafter
from ssd.config import DrafterConfig
from ssd.replay import Recording
from ssd.types import DraftBatch, Drafter

# The kernels take seconds to import.
if TYPE_CHECKING:
    from ssd.drafter import SuffixDrafter
    from ssd.replay import Counts, Step

PRIOR = ROOT / "ssd" / "kernels" / "prior.npz"
"""Start values that `ssd` ships."""
OWN_DRAFTERS = ("ssd", "classic", "ngram", "none")
BY_VERSION = "version"
"""Concurrency of synchronous rollouts: all requests of a version at once, then all of the next version."""
MIN_CAPACITY = 1 << 16
"""Minimum capacity of a corpus; small traces would need less than is used in practice."""
COLD_SHARE = 0.1
"""Fraction of the output tokens that is left out of `ece`."""
BINS = 10
"""Number of bins of the expected calibration error, of equal width."""
BLOCKS = 20
"""Number of parts of a replay that are counted apart, if it has as many requests."""


@dataclass(frozen=True)
class Candidate:
    """A drafter in one setting."""

    drafter: str
    setting: str
    build: Callable[[int], Drafter]
    """Returns a new drafter with room for a number of tokens."""
    k: int = 0
    """Maximum number of tokens in a draft."""
    shape: str = "path"
    cost: float | None = None
    """Configured cost per token; None for a drafter without that setting, for which one replay covers all costs."""


def own_candidates(
    drafter: str,
    ks: Sequence[int],
    shapes: Sequence[str] = (),
    costs: Sequence[float] = (),
    *,
    prior: Path | None = PRIOR,
) -> Iterator[Candidate]:
    """Return the settings of one of the project's drafters. prior: see `ssd_drafter`."""
    if drafter == "none":
        yield Candidate("none", "", lambda _: NoDrafter())
        return
    for k in ks:
        if drafter == "ngram":
            yield Candidate("ngram", f"k={k}", lambda _: NgramDrafter(), k)
        elif drafter == "classic":
            yield Candidate("classic", f"k={k}", functools.partial(classic_drafter, k=k), k)
        else:
            for shape in shapes:
                for cost in costs:
                    build = functools.partial(ssd_drafter, k=k, shape=shape, cost=cost, prior=prior)
                    yield Candidate("ssd", f"{shape} k={k}", build, k, shape, cost)


def ssd_drafter(capacity: int, k: int, shape: str, cost: float, prior: Path | None = PRIOR) -> SuffixDrafter:
    """Return SSD's drafter, whose tables start from a file of `benchmarks.priors`; None: from formulas."""
    from ssd import Corpus, SuffixDrafter
    from ssd.kernels.learned import start_values

    config = DrafterConfig(capacity=capacity, draft_shape=shape, max_draft=k, cost=cost)  # type: ignore[arg-type]
    corpus = Corpus.from_config(config)
    if prior != PRIOR:
        for own, start in zip(corpus.learned, start_values(prior), strict=False):
            own[:] = start
    return SuffixDrafter(config, corpus=corpus)


def classic_drafter(capacity: int, k: int) -> Drafter:
    """Return the baseline drafter."""
    from ssd import ClassicDrafter, Corpus

    config = DrafterConfig(capacity=capacity, max_draft=k)
    return ClassicDrafter(config, corpus=Corpus.from_config(config))


@dataclass
class Tally:
    """What is known of a replay."""

    has_probs: bool
    """Whether the drafter estimates probabilities."""
    cold_until: float
    """Number of output tokens before which drafts are left out of `ece`."""
    path_probs: list[float] = field(default_factory=list)
    """Path probability of each draft token."""
    agrees: list[bool] = field(default_factory=list)
    """Whether the whole path of each draft token is in the output; parallel to `path_probs`."""
    cold_tokens: int = 0
    """Number of these tokens that were drafted before `COLD_SHARE` of the output."""
    draft_s: list[float] = field(default_factory=list)
    """Seconds per sequence of each draft call."""
    output_tokens: int = 0
    prompt_tokens: int = 0
    counts: Counts = field(init=False)

    def observe(self, step: Step) -> None:
        """Add a step."""
        self.draft_s += [step.draft_s / len(step)] * len(step)
        if self.has_probs:
            self.path_probs += path_probs_of(step.drafts)
            self.agrees += (step.depths > 0).tolist()
            self.cold_tokens += len(step.depths) if self.output_tokens < self.cold_until else 0
        self.output_tokens += int(step.committed.sum())


def path_probs_of(drafts: DraftBatch) -> list[float]:
    """Return the estimated probability that each draft token and all before it on its path are accepted."""
    parents, probs, offsets = drafts.parents.tolist(), drafts.accept_prob.tolist(), drafts.offsets.tolist()
    path_probs: list[float] = []
    for left, right in pairwise(offsets):
        for node in range(left, right):
            before = path_probs[left + parents[node]] if parents[node] >= 0 else 1.0
            path_probs.append(probs[node] * before)
    return path_probs


def new_drafter(candidate: Candidate, recording: Recording, times: int = 1) -> Drafter:
    """Return a new drafter with room for all requests of `times` replays."""
    remembered = recording.output_tokens + len(recording) * (DrafterConfig.learned_prompt_tokens + 1)
    return candidate.build(max(MIN_CAPACITY, times * remembered))


def replay(
    candidate: Candidate,
    recording: Recording,
    concurrency: int | str = 1,
    *,
    times: int = 1,
    groups: bool = False,
    drafter: Any = None,
    watch: Callable[[int], None] = lambda _tokens: None,
) -> Tally:
    """Replay a recording with a new drafter, `concurrency` requests at a time or by version (see `BY_VERSION`).

    times: number of replays with the same drafter, each with other sessions and versions; the tally is that of the last
    one. groups: whether a drafter that takes rollouts is given groups and versions. drafter: instead of a new one.
    watch: called with numbers of replayed output tokens. The classic drafter gets no session ids.
    """
    import ssd.replay
    from ssd.base import CorpusDrafter
    from ssd.corpus.rollout import Rollout

    drafter = drafter or new_drafter(candidate, recording, times)
    taken, versions = inspect.signature(drafter.start).parameters, recording.versions
    batches = None
    if concurrency == BY_VERSION:
        batches = [np.flatnonzero(versions == version) for version in np.unique(versions)]
    for number in range(times):
        tally = Tally(
            candidate.drafter == "arctic" or isinstance(drafter, CorpusDrafter), COLD_SHARE * recording.output_tokens
        )

        def options(request: int, number: int = number) -> Mapping[str, object]:
            given: dict[str, object] = {"session_id": None} if candidate.drafter == "classic" else {}
            session, group, version = int(recording.sessions[request]), recording.groups[request], versions[request]
            if number and session >= 0 and "session_id" in taken and not given:
                given["session_id"] = f"{session}, replay {number}"
            if groups and group >= 0 and "rollout" in taken:
                given["rollout"] = Rollout(str(group), max(0, int(version)) + number * (1 + int(versions.max())))
            return given

        def observe(step: Step, tally: Tally = tally) -> None:
            tally.observe(step)
            watch(int(step.committed.sum()))

        tally.counts = ssd.replay.replay(
            recording,
            drafter,
            concurrency=len(recording) if isinstance(concurrency, str) else concurrency,
            max_draft=candidate.k,
            batches=batches,
            options=options,
            observe=observe,
        )
    tally.prompt_tokens = int(recording.prompt_lengths.sum())
    return tally


def figures(tally: Tally, cost: float) -> Row:
    """Return a replay's figures if each draft token costs `cost` of a step."""
    counts, drafted = tally.counts, int(tally.counts.drafted.sum())
    p50, p99 = np.percentile(np.array(tally.draft_s) * 1e6, [50, 99])
    probs, agrees = np.array(tally.path_probs), np.array(tally.agrees, bool)
    return {
        "output_tokens": tally.output_tokens,
        "steps": int(counts.steps.sum()),
        "tokens_per_step": round(counts.tokens_per_step, 4),
        "drafted_per_step": round(counts.drafted_per_step, 4),
        "accept_rate": round(int(counts.accepted.sum()) / drafted, 4) if drafted else None,
        "S": round(counts.speedup_at(cost), 4),
        "ece": calibration_error(probs[tally.cold_tokens :], agrees[tally.cold_tokens :]) if tally.has_probs else None,
        "draft_us_p50": round(float(p50), 2),
        "draft_us_p99": round(float(p99), 2),
        "insert_us_per_token": round(counts.other_s * 1e6 / (tally.prompt_tokens + tally.output_tokens), 3),
    }


def calibration_error(probs: np.ndarray, agrees: np.ndarray) -> float | None:
    """Return the expected calibration error: the mean difference of probs [N] and truth [N], bin by bin."""
    if len(probs) == 0:
        return None
    bins = np.minimum((probs * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, probs - agrees, BINS)
    return round(float(np.abs(gaps).sum() / len(probs)), 4)


def blocks(counts: Counts) -> list[list[int]]:
    """Return output tokens, steps and draft tokens of groups of consecutive requests, at most `BLOCKS` numbers each."""
    columns = (counts.tokens, counts.steps, counts.drafted)
    return [[int(part.sum()) for part in np.array_split(column, min(BLOCKS, len(column)))] for column in columns]


def row_of(trace: str, candidate: Candidate, cost: float, concurrency: int | str, tally: Tally) -> Row:
    """Return one line of the results."""
    return {
        "trace": trace,
        "drafter": candidate.drafter,
        "setting": candidate.setting,
        "k": candidate.k,
        "shape": candidate.shape,
        "cost": cost,
        "concurrency": concurrency,
        **figures(tally, cost),
    }


def best_rows(rows: Sequence[Row]) -> list[Row]:
    """Return each drafter's row with the largest S, for each concurrency, trace and cost; SSD's for each setting."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        own = row["setting"] if row["drafter"] == "ssd" else ""
        key = (row["concurrency"], row["trace"], row["cost"], row["drafter"], own)
        if key not in best or row["S"] > best[key]["S"]:
            best[key] = row
    return list(best.values())
