"""Replay a recording with a setting of a drafter, and keep what the figures of the replay benchmark need."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

import ssd.replay
from benchmarks.support.drafters import Candidate
from benchmarks.support.peers.arctic import Arctic
from benchmarks.support.scores import BY_VERSION
from ssd.base import CorpusDrafter
from ssd.baselines.classic import ClassicDrafter
from ssd.corpus.rollout import Rollout
from ssd.replay import Counts, Recording, Step
from ssd.types import DraftBatch

COLD_SHARE = 0.1
"""Fraction of the output tokens that is left out of `ece`."""
LATE_EPOCH = 3
"""Epoch from which requests count for `tokens_per_step_late`: the number of earlier versions that had its group."""


@dataclass
class Tally:
    """What is known of a replay."""

    has_probs: bool
    """Whether the drafter estimates probabilities."""
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
    is_late: np.ndarray = field(init=False)
    """bool [R]: requests of an epoch from `LATE_EPOCH` on."""
    bytes_per_token: float | None = None
    """Memory per remembered token; None if nothing is remembered or it is unknown."""

    def observe(self, step: Step, cold_until: float) -> None:
        """Add a step; cold_until: number of output tokens before which drafts are left out of `ece`."""
        self.draft_s += [step.draft_s / len(step)] * len(step)
        if self.has_probs:
            self.path_probs += path_probs_of(step.drafts)
            self.agrees += (step.depths > 0).tolist()
            self.cold_tokens += len(step.depths) if self.output_tokens < cold_until else 0
        self.output_tokens += int(step.committed.sum())


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

    times: number of replays with the same drafter; the tally is that of the last one. groups: whether the drafter is
    given groups and versions. drafter: instead of a new one. watch: called with numbers of replayed output tokens.
    """
    recording = copies_of(recording, times)
    drafter = drafter or candidate.build(recording)
    for requests in np.split(np.arange(len(recording)), times):
        tally = Tally(isinstance(drafter, CorpusDrafter | Arctic))
        cold_until = COLD_SHARE * int(recording.output_lengths[requests].sum())

        def observe(step: Step, tally: Tally = tally, cold_until: float = cold_until) -> None:
            tally.observe(step, cold_until)
            watch(int(step.committed.sum()))

        tally.counts = ssd.replay.replay(
            recording,
            drafter,
            concurrency=len(recording) if isinstance(concurrency, str) else concurrency,
            max_draft=candidate.k,
            batches=_by_version(recording, requests) if concurrency == BY_VERSION else [requests],
            options=options_of(drafter, recording if groups else None),
            observe=observe,
        )
    tally.prompt_tokens = int(recording.prompt_lengths[requests].sum())
    epochs = epochs_of(recording)
    tally.is_late = np.zeros(len(recording), bool) if epochs is None else epochs >= LATE_EPOCH
    tally.bytes_per_token = bytes_per_token(drafter)
    return tally


def copies_of(recording: Recording, times: int) -> Recording:
    """Return `times` copies of a recording, one after another, with different sessions and versions."""
    if times == 1:
        return recording
    return Recording.from_arrays(
        np.tile(recording.tokens, times),
        np.tile(recording.prompt_lengths, times),
        np.tile(recording.output_lengths, times),
        name=recording.name,
        sessions=_renumbered(recording.sessions, times),
        groups=np.tile(recording.groups, times),
        versions=_renumbered(recording.versions, times),
    )


def _renumbered(numbers: np.ndarray, times: int) -> np.ndarray:
    """Return `times` copies of numbers, each with numbers above those before it, int64 [R * times]; -1 stays."""
    copies = numbers + np.arange(times)[:, None] * (1 + numbers.max())
    return np.where(numbers < 0, -1, copies).ravel()


def _by_version(recording: Recording, requests: np.ndarray) -> list[np.ndarray]:
    versions = recording.versions[requests]
    return [requests[versions == version] for version in np.unique(versions)]


def epochs_of(recording: Recording) -> np.ndarray | None:
    """Return the number of lower versions in which the group of each request occurs, int64 [R].

    None if not all requests have a group and a version.
    """
    if (recording.groups < 0).any() or (recording.versions < 0).any():
        return None
    epochs = np.empty(len(recording), np.int64)
    for group in np.unique(recording.groups):
        rows = recording.groups == group
        epochs[rows] = np.unique(recording.versions[rows], return_inverse=True)[1]
    return epochs


def options_of(drafter: Any, grouped: Recording | None) -> Callable[[int], Mapping[str, object]]:
    """Return the function that returns further arguments of a drafter's `start` for a request.

    grouped: the recording if the drafter is given groups and versions. The classic drafter gets no session ids.
    """
    taken = inspect.signature(drafter.start).parameters
    fixed = {"session_id": None} if isinstance(drafter, ClassicDrafter) else {}

    def options(request: int) -> Mapping[str, object]:
        if grouped is None:
            return fixed
        group, version = int(grouped.groups[request]), int(grouped.versions[request])
        name = None if group < 0 else str(group)
        if "group" in taken:
            return {"group": name, "version": None if version < 0 else version}
        if "rollout" in taken:
            return fixed | {"rollout": None if name is None else Rollout(name, max(0, version))}
        return fixed

    return options


def path_probs_of(drafts: DraftBatch) -> list[float]:
    """Return the estimated probability that each draft token and all before it on its path are accepted."""
    parents, probs, offsets = drafts.parents.tolist(), drafts.accept_prob.tolist(), drafts.offsets.tolist()
    path_probs: list[float] = []
    for left, right in pairwise(offsets):
        for node in range(left, right):
            before = path_probs[left + parents[node]] if parents[node] >= 0 else 1.0
            path_probs.append(probs[node] * before)
    return path_probs


def bytes_per_token(drafter: Any) -> float | None:
    """Return a drafter's memory per remembered token; that of Python objects says nothing about the originals."""
    if isinstance(drafter, Arctic):
        return drafter.bytes_per_token()
    return drafter.memory_bytes() / max(1, drafter.corpus.tokens) if isinstance(drafter, CorpusDrafter) else None
