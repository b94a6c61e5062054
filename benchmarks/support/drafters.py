"""This project's drafters in the replay benchmark; `benchmarks/support/peers/` has the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ssd.baselines.ngram import NgramDrafter
from ssd.baselines.none import NoDrafter
from ssd.config import DrafterConfig
from ssd.replay import Recording
from ssd.types import Drafter

if TYPE_CHECKING:
    from ssd.budget.curve import StepCurve
    from ssd.drafter import SuffixDrafter

OWN_DRAFTERS = ("ssd", "classic", "ngram", "none")

MIN_CAPACITY = 1 << 16
"""Minimum capacity of a corpus; small traces would need less than is used in practice."""


@dataclass(frozen=True)
class Candidate:
    """A drafter in one setting."""

    drafter: str
    setting: str
    build: Callable[[Recording], Any]
    """Returns a new drafter, a `ssd.types.Drafter` or a peer, with room for all requests."""
    k: int = 0
    """Maximum number of tokens in a draft."""
    shape: str = "path"
    cost: float | None = None
    """Configured cost per token; None for a drafter without that setting, for which one replay covers all costs."""


def own_candidates(
    drafter: str, ks: Sequence[int], shapes: Sequence[str], costs: Sequence[float]
) -> Iterator[Candidate]:
    """Return the settings of one of the project's drafters."""
    if drafter == "none":
        yield Candidate("none", "", lambda _: NoDrafter())
        return
    for k in ks:
        if drafter == "ngram":
            yield Candidate("ngram", f"k={k}", lambda _: NgramDrafter(), k)
        elif drafter == "classic":
            yield Candidate("classic", f"k={k}", lambda recording, k=k: _classic(recording, k), k)
        else:
            for shape in shapes:
                for cost in costs:
                    build = functools.partial(ssd_drafter, k=k, shape=shape, cost=cost)
                    yield Candidate("ssd", f"{shape} k={k}", build, k, shape, cost)


def starting_from(candidate: Candidate, prior: Path | None) -> Candidate:
    """Return a setting of SSD whose tables start from a file of `benchmarks.priors`; None: from formulas."""

    def build(recording: Recording) -> SuffixDrafter:
        from ssd.kernels.learned import start_values

        drafter = candidate.build(recording)
        for own, start in zip(drafter.corpus.learned.arrays, start_values(prior), strict=False):
            own[:] = start
        return drafter

    return replace(candidate, build=build)


def with_library(candidate: Candidate, library: Recording) -> Iterator[Candidate]:
    """Yield a setting of SSD with the outputs of a recording as a library, and the same without it for comparison."""
    yield replace(candidate, build=lambda recording: _reading(candidate.build(recording), library))
    yield replace(candidate, drafter=f"no library, {candidate.shape}")


def _reading(drafter: SuffixDrafter, library: Recording) -> SuffixDrafter:
    from ssd import Corpus

    corpus, learned = Corpus(_capacity_for(library)), DrafterConfig.learned_prompt_tokens
    for request in library.requests:
        start = max(0, len(request.prompt) - learned)
        corpus.append(np.concatenate((request.prompt[start:], request.output)))
    corpus.refresh()
    drafter.corpus.read_from(corpus)
    return drafter


def ssd_drafter(
    recording: Recording, k: int, shape: str, cost: float | None = None, curve: StepCurve | None = None
) -> Drafter:
    """Return SSD's drafter with room for all requests; curve: durations of the engine's steps."""
    # The kernels take seconds to import.
    from ssd import Corpus, SuffixDrafter

    config = DrafterConfig(capacity=_capacity_for(recording), draft_shape=shape, max_draft=k, cost=cost)  # type: ignore[arg-type]
    return SuffixDrafter(config, corpus=Corpus.from_config(config), curve=curve)


def _classic(recording: Recording, k: int) -> Drafter:
    from ssd import ClassicDrafter, Corpus

    config = DrafterConfig(capacity=_capacity_for(recording), max_draft=k)
    return ClassicDrafter(config, corpus=Corpus.from_config(config))


def _capacity_for(recording: Recording) -> int:
    learned = DrafterConfig.learned_prompt_tokens + 1
    return max(MIN_CAPACITY, recording.output_tokens + len(recording) * learned)
