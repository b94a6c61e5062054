"""Advice from the replays of a log: whether drafting is worthwhile, for which requests, and with which settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from drafter_service.commands.advise import arctic
from drafter_service.commands.advise.reading import LogFacts
from drafter_service.commands.advise.trials import Origin, Outcome, Trial, concurrency_of, host_ms, needed_capacity
from drafter_service.observability.pages import units
from ssd.budget.cost_profile import CostProfile
from ssd.config import DrafterConfig, DraftShape
from ssd.replay import Counts, Recording

CONCURRENCIES = (1, 4, 16, 64, 256)
"""Requests at once for which the speed-up is predicted."""
MAX_DRAFTS = (4, 8, 16)
"""Maximum lengths of paths, and lengths that paths are padded to. A step of vLLM must have room for as many tokens of
each sequence that it may run, so longer ones are not advised."""
MIN_USEFUL_SPEEDUP = 1.05
"""Smallest predicted speed-up for which drafting is called worthwhile."""
MIN_RELIABLE_TOKENS = 20_000
"""Output tokens from which the figures of a log are reliable."""
CURVE_POINTS = 40
"""Number of points of the growth curve."""
SOURCE_COVERAGE = 0.98
"""Share of the accepted tokens whose sources the recommended capacity keeps."""
AGES = tuple(1 << power for power in range(12, 33))


@dataclass(frozen=True)
class Group:
    """Requests with outputs of similar length."""

    name: str
    requests: int
    share: float
    """Share of all output tokens."""
    tokens_per_step: float


@dataclass(frozen=True)
class Advice:
    """The results for one log."""

    verdict: str
    settings: DrafterConfig
    vllm: str
    """Flags of vLLM; empty if drafting is not worthwhile."""
    best: Outcome
    """Prediction for the drafts that vLLM verifies with these flags, over the whole log."""
    speedups: Sequence[Outcome]
    """Predictions for each drafter, shape and number of requests at once, over the first part of the log. Trees are
    included, although vLLM does not verify them."""
    lengths: Sequence[Outcome]
    """Predictions for several maximum lengths of drafts, and for the best padded length with each number of requests at
    once, over the first part of the log."""
    growth: Sequence[tuple[int, float]]
    """Output tokens remembered so far, and tokens per step of the requests that ended then."""
    sizes: Sequence[Group]
    """Requests by length of the output."""
    kept: Sequence[tuple[int, float]]
    """Tokens remembered, and share of the accepted tokens whose source would still be in the corpus."""
    tokens_per_hour: float | None
    """Rate at which the log fills a corpus; None without times."""
    other_users: float | None
    """Share of the traced accepted tokens that came from another user's text; None where the log has no users."""
    other_sessions: float | None
    """Share of the traced accepted tokens that came from another session's text; None where the log has no sessions."""
    notes: Sequence[str]
    """Sentences about anything unusual in the log."""


def plan_samples(recording: Recording, profile: CostProfile, given: int | None) -> list[Trial]:
    """Return the trials that compare settings on a part of the log. given: requests at once; None: as in the log."""
    main = concurrency_of(recording, given)
    capacity = needed_capacity(recording, DrafterConfig.capacity)
    longest = {"path": MAX_DRAFTS[-1], "tree": DrafterConfig.max_draft}

    def trial(drafter: str, shape: DraftShape, max_draft: int, count: int, *, is_padded: bool = False) -> Trial:
        return Trial(drafter, shape, max_draft, count, capacity, is_padded)

    # Durations of larger steps are not known.
    counts = {main, *(count for count in CONCURRENCIES if count <= profile.max_sequences)}
    ascending = sorted(counts)
    shapes: tuple[DraftShape, ...] = ("path", "tree")
    by_concurrency = [trial("ssd", shape, longest[shape], count) for count in ascending for shape in shapes]
    others = [trial(drafter, "path", longest["path"], main) for drafter in ("ngram", "classic")]
    if arctic.is_installed():
        others.append(trial("arctic", "tree", longest["tree"], main))
    lengths = [trial("ssd", "path", length, main) for length in MAX_DRAFTS[:-1]]
    padded = [trial("ssd", "path", length, count, is_padded=True) for count in ascending for length in MAX_DRAFTS]
    return by_concurrency + others + lengths + padded


def plan_whole(recording: Recording, given: int | None, samples: Sequence[Outcome]) -> Trial:
    """Return the trial over the whole log, with the drafts that vLLM should verify by the outcomes of the samples."""
    choice = vllm_choice(_paths(samples), concurrency_of(recording, given))
    capacity = needed_capacity(recording, DrafterConfig.capacity)
    return Trial("ssd", "path", choice.trial.max_draft, given or 0, capacity, choice.trial.is_padded, is_whole=True)


def advise(
    recording: Recording,
    facts: LogFacts,
    profile: CostProfile,
    samples: Sequence[Outcome],
    whole: Outcome,
    given: int | None,
) -> Advice:
    """Return the advice; samples, whole: outcomes of `plan_samples` and `plan_whole`."""
    best = replace(whole, trial=replace(whole.trial, concurrency=concurrency_of(recording, given)))
    kept = _kept(whole.origins)
    paths = _paths(samples)
    padded, shorter = best_padded(paths), [one for one in paths if one.trial.max_draft < MAX_DRAFTS[-1]]
    is_worthwhile = best.speedup >= MIN_USEFUL_SPEEDUP
    return Advice(
        verdict=_verdict(best, profile),
        settings=DrafterConfig(capacity=_capacity(kept), draft_shape="path", max_draft=longest_draft(best, padded)),
        vllm=vllm_flags(best, padded) if is_worthwhile else "",
        best=best,
        speedups=[one for one in samples if not one.trial.is_padded and one not in shorter],
        lengths=[*(one for one in shorter if not one.trial.is_padded), *padded],
        growth=_growth(whole.counts),
        sizes=_size_groups(whole.counts),
        kept=kept,
        tokens_per_hour=_tokens_per_hour(recording),
        other_users=_share_from_other_owners(whole.origins, recording.users),
        other_sessions=_share_from_other_owners(whole.origins, recording.sessions),
        notes=[*_drafts_notes(best, samples), *_notes(recording, facts, whole.trial, profile, best.trial.concurrency)],
    )


def _paths(samples: Sequence[Outcome]) -> list[Outcome]:
    """Return the predictions for SSD's paths, padded ones included."""
    return [one for one in samples if (one.trial.drafter, one.trial.draft_shape) == ("ssd", "path")]


def _verdict(best: Outcome, profile: CostProfile) -> str:
    where = f"with {units.counted(best.trial.concurrency, 'request')} at once on {profile.label}"
    form = "paths padded to" if best.trial.is_padded else "paths of at most"
    tokens = f"{best.counts.tokens_per_step:.2f} tokens per step"
    drafts = f"{form} {best.trial.max_draft} tokens, as vLLM verifies them"
    kind = "estimated" if profile.source == "roofline" else "predicted"
    worth = "not worthwhile" if best.speedup < MIN_USEFUL_SPEEDUP else "worthwhile"
    verdict = f"Drafting is {worth} for this traffic: {kind} speed-up {best.speedup:.2f}x {where} ({tokens}, {drafts})."
    if best.output_tokens >= MIN_RELIABLE_TOKENS:
        return verdict
    size = units.counted(best.output_tokens, "output token")
    return (
        f"{verdict} This is not reliable, because the log has only {size}; "
        f"give a log with at least {MIN_RELIABLE_TOKENS:,}."
    )


def _growth(counts: Counts) -> list[tuple[int, float]]:
    """Return tokens per step of parts of the replay with equal numbers of output tokens."""
    remembered = np.cumsum(counts.tokens[counts.order])
    steps = np.cumsum(counts.steps[counts.order])
    ends = np.searchsorted(remembered, np.linspace(0, remembered[-1], CURVE_POINTS + 1)[1:] - 0.5)
    points, before = [], -1
    for end in np.unique(ends).tolist():
        produced = remembered[end] - (remembered[before] if before >= 0 else 0)
        points.append((int(remembered[end]), float(produced / (steps[end] - (steps[before] if before >= 0 else 0)))))
        before = end
    return points


def _size_groups(counts: Counts) -> list[Group]:
    """Return about a quarter of the requests each, by length of their outputs; equal lengths are in one group."""
    lengths = counts.tokens
    total, groups = int(lengths.sum()), []
    edges = np.unique(np.quantile(lengths, (0.25, 0.5, 0.75, 1), method="higher"))
    for least, most in zip([-1, *edges[:-1]], edges, strict=True):
        rows = np.flatnonzero((lengths > least) & (lengths <= most))
        first, last = int(lengths[rows].min()), int(lengths[rows].max())
        name = f"{first:,} output tokens" if first == last else f"{first:,} to {last:,} output tokens"
        own = int(lengths[rows].sum())
        groups.append(Group(name, len(rows), own / total, own / int(counts.steps[rows].sum())))
    return groups


def _kept(origins: Sequence[Origin]) -> list[tuple[int, float]]:
    """Return which share of the accepted tokens with a source in the corpus has one that is at most this old."""
    known = [each for each in origins if each.age >= 0]
    total = sum(each.accepted for each in known)
    shares: list[tuple[int, float]] = []
    for most in AGES:
        if not total or (shares and shares[-1][1] >= 1):
            break
        shares.append((most, sum(each.accepted for each in known if each.age <= most) / total))
    return shares


def _capacity(kept: Sequence[tuple[int, float]]) -> int:
    """Return a capacity, in steps of a factor of two, that keeps enough sources, with room for as much again."""
    if not kept:
        return DrafterConfig.capacity
    needed = next(age for age, share in kept if share >= SOURCE_COVERAGE)
    return min(max(2 * needed, 1 << 20), 1 << 30)


def _tokens_per_hour(recording: Recording) -> float | None:
    if not recording.has_times:
        return None
    seconds = float(recording.began_s.max() - recording.began_s.min())
    return None if seconds <= 0 else recording.output_tokens / seconds * 3600


def _share_from_other_owners(origins: Sequence[Origin], owners: np.ndarray) -> float | None:
    """Return the share of the traced accepted tokens that came from a request of another known owner."""
    if not origins or (owners < 0).all():
        return None
    accepted, _, requests, sources = np.array(origins, np.int64).T
    mine, theirs = owners[requests], owners[sources]
    is_foreign = (sources >= 0) & (mine >= 0) & (theirs >= 0) & (mine != theirs)
    return float(accepted[is_foreign].sum() / accepted.sum())


def _drafts_notes(best: Outcome, samples: Sequence[Outcome]) -> list[str]:
    """Return what the verdict on vLLM's drafts depends on, and what other hosts would gain."""
    notes = [
        f"a step with drafts includes {host_ms(best.trial.concurrency):.1f} ms in which the device waits for the host, "
        "as measured on one machine (docs/operations.md)"
    ]
    if best.speedup >= MIN_USEFUL_SPEEDUP:
        notes.append("vLLM starts only if --max-num-batched-tokens exceeds num_speculative_tokens x --max-num-seqs")
    alike = [one for one in samples if (one.trial.drafter, one.trial.concurrency) == ("ssd", best.trial.concurrency)]
    tree = max((one.speedup for one in alike if one.trial.draft_shape == "tree"), default=0.0)
    path = max(one.speedup for one in alike if one.trial.draft_shape == "path")
    if path < NEAR_BEST * tree:
        notes.append(
            f"hosts that verify trees, such as SGLang, would gain more: {tree:.2f}x where paths gain {path:.2f}x"
        )
    return notes


def _notes(recording: Recording, facts: LogFacts, trial: Trial, profile: CostProfile, concurrency: int) -> list[str]:
    notes = []
    if concurrency > profile.max_sequences:
        notes.append(
            f"the speed-up with {units.counted(concurrency, 'request')} at once is extrapolated: the cost profile "
            f"ends at {units.counted(profile.max_sequences, 'sequence')}"
        )
    if facts.faults.count:
        notes.append(f"records that could not be read: {facts.faults.count:,}: {facts.faults.summary}")
    if facts.note:
        notes.append(facts.note)
    if facts.backwards and recording.has_times:
        notes.append(f"requests that were out of order, and were sorted by time: {facts.backwards:,}")
    if facts.repeated_names:
        notes.append(f"requests with the id and the text of an earlier one: {facts.repeated_names:,}")
    if not recording.prompt_lengths.any():
        notes.append("no request has a prompt, so drafts from prompts are missing from these figures")
    if not recording.has_times:
        notes.append("the log has no times, so its order was used")
    if trial.concurrency == 0 and recording.concurrency() is None:
        notes.append("the log has no start and end times, so one request at a time was replayed; give --concurrency")
    return notes


# --- The drafts that vLLM should verify, and the flags with which it does

NEAR_BEST = 0.99
"""Share of the largest speed-up that a shorter maximum length of drafts must reach to be preferred."""
NEAR_PADDED = 0.95
"""Share of the synchronous speed-up from which asynchronous scheduling is preferred: it hides the host's own time."""
PLUGIN = "drafter_service.plugins.vllm"


def vllm_choice(paths: Sequence[Outcome], concurrency: int) -> Outcome:
    """Return what vLLM should verify with a number of requests at once.

    paths: predictions for paths with several maximum lengths, which synchronous scheduling verifies, and for paths that
    are padded to one length, as asynchronous scheduling does.
    """
    at_once = [one for one in paths if one.trial.concurrency == concurrency]
    ragged = [one for one in at_once if not one.trial.is_padded]
    fastest = max(one.speedup for one in ragged)
    padded = max((one for one in at_once if one.trial.is_padded), key=lambda one: one.speedup)
    if padded.speedup > max(1, NEAR_PADDED * fastest):
        return padded
    return min((one for one in ragged if one.speedup >= NEAR_BEST * fastest), key=lambda one: one.trial.max_draft)


def best_padded(paths: Sequence[Outcome]) -> list[Outcome]:
    """Return the fastest of the padded drafts for each number of requests at once, ascending."""
    padded = [one for one in paths if one.trial.is_padded]
    counts = sorted({one.trial.concurrency for one in padded})
    return [
        max((one for one in padded if one.trial.concurrency == count), key=lambda one: one.speedup) for count in counts
    ]


def longest_draft(choice: Outcome, padded: Sequence[Outcome]) -> int:
    """Return the largest length of a draft; padded: see `best_padded`."""
    return max(_lengths(padded).values()) if choice.trial.is_padded else choice.trial.max_draft


def vllm_flags(choice: Outcome, padded: Sequence[Outcome]) -> str:
    """Return flags of `vllm serve` for a choice; docs/hosts/vllm.md describes its two variants.

    padded: see `best_padded`.
    """
    settings: dict[str, object] = {"method": "ngram", "num_speculative_tokens": longest_draft(choice, padded)}
    scheduling, scheduler = "--no-async-scheduling", "Scheduler"
    if choice.trial.is_padded:
        scheduling, scheduler = "--async-scheduling", "AsyncScheduler"
        settings["num_speculative_tokens_per_batch_size"] = ranges_of(_lengths(padded))
    return (
        f"{scheduling} --scheduler-cls {PLUGIN}.{scheduler} --worker-cls {PLUGIN}.Worker "
        f"--speculative-config '{json.dumps(settings)}'"
    )


def _lengths(padded: Sequence[Outcome]) -> dict[int, int]:
    """Return the best length that drafts are padded to by number of requests at once; 0 where drafts do not pay."""
    return {one.trial.concurrency: one.trial.max_draft if one.speedup > 1 else 0 for one in padded}


def ranges_of(lengths: dict[int, int]) -> list[list[int]]:
    """Return ranges of batch sizes, first and last, with a length of drafts, as vLLM reads them.

    lengths: by batch size, ascending; sizes in between have that of the next larger one.
    """
    ranges: list[list[int]] = []
    for count, length in lengths.items():
        if ranges and ranges[-1][2] == length:
            ranges[-1][1] = count
        else:
            ranges.append([ranges[-1][1] + 1 if ranges else 1, count, length])
    return ranges
