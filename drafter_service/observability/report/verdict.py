"""Sentences about a report: the savings from drafting, and problems."""

from __future__ import annotations

from drafter_service.observability.pages import units
from drafter_service.observability.report.schema import (
    Drafting,
    NamespaceReport,
    Report,
    ShadowReport,
)

MIN_GAIN = 0.01
"""Minimum share of saved steps that is reported as a gain."""
MAX_LATE_SHARE, MIN_LATE_STEPS = 0.01, 100
"""An engine is reported if more of its steps are late than both. At 1 % drafts give 1 % less."""
MAX_LATE_ENGINES = 3
"""Maximum number of engines that are reported, those with most late steps."""
MAX_CALIBRATION_ERROR = 0.05
MIN_CALIBRATION_TOKENS = 10_000
"""Minimum number of draft tokens from which calibration is judged."""
MAX_LOG_LAG_S = 5.0
NOTHING = ("No namespace that you may read is in memory.", "`ssd-drafter namespaces` also lists those on disk.")
"""Sentences of a report without namespaces: those on disk are loaded when they are first used."""


def saving(drafting: Drafting) -> str:
    """Return the predicate of a sentence about the savings, whose subject is the namespace."""
    if drafting.steps == 0:
        return "has not received a request for drafts yet."
    is_gain = (drafting.saved_share or 0.0) >= MIN_GAIN
    if drafting.drafted == 0 and not is_gain:  # Engines may report draft tokens later than steps, or never.
        return f"has drafted nothing in {units.counted(drafting.steps, 'step')}: no remembered text has recurred."
    tokens = f"{units.ratio(drafting.tokens_per_step)} tokens per step instead of 1"
    if not is_gain:
        return f"saves less than 1% of the target's steps so far: {tokens}."
    return f"saves {units.share(drafting.saved_share)} of the target's steps: {tokens}."


def worth(drafting: Drafting) -> str:
    """Return a sentence about the cost up to which drafts are worthwhile; empty if nothing was saved."""
    share = drafting.break_even_cost
    if not share:
        return ""
    if share >= 1:
        return "Drafts are worthwhile at any cost of verifying a token."
    return f"Drafts are worthwhile as long as verifying a token takes less than {units.share(share)} of a step."


def in_shadow(shadow: ShadowReport | None) -> str:
    """Return a sentence about the drafts that were withheld; empty if there were none."""
    if shadow is None:
        return ""
    drafting = shadow.drafting
    tokens, tokens_per_step = units.counted(drafting.committed, "token"), units.ratio(drafting.tokens_per_step)
    accepted = units.share(drafting.acceptance)
    return f"shadow: over {tokens}, drafts would have given {tokens_per_step} tokens per step (acceptance {accepted})."


def remarks(namespace: NamespaceReport) -> list[str]:
    """Return sentences about problems of a namespace."""
    found = []
    late = [
        each
        for each in namespace.by_client
        if each.late_steps >= MIN_LATE_STEPS and (each.late_share or 0.0) > MAX_LATE_SHARE
    ]
    for each in sorted(late, key=lambda each: -each.late_steps)[:MAX_LATE_ENGINES]:
        name = units.shortened(each.engine or each.client or "an engine without a name")
        found.append(
            f"{name}: {units.share(each.late_share)} of its steps ({units.count(each.late_steps)}) had no drafts "
            "because the answer was late. Raise its deadline_s, or give the drafter a core of its own."
        )
    error = namespace.calibration.error
    if error is not None and error > MAX_CALIBRATION_ERROR and namespace.drafting.drafted >= MIN_CALIBRATION_TOKENS:
        found.append(
            f"Acceptance probabilities are off by {units.share(error)} on average, so drafts are longer or shorter "
            "than optimal. They are learned from the numbers of verified tokens that engines report; check those."
        )
    if namespace.corpus.dropped_requests:
        found.append(
            f"Merging was too slow for what finished: {units.count(namespace.corpus.dropped_requests)} requests were "
            "not learned. Give the drafter more processors and memory."
        )
    return found


def service_remarks(report: Report) -> list[str]:
    """Return sentences about problems of the service."""
    log = report.service.log
    found = [
        f"Damaged files of {units.printable(name)} were set aside: {', '.join(files)}. Restore a backup; "
        f"`ssd-drafter drop {units.printable(name)} --set-aside` deletes them."
        for name, files in report.service.set_aside.items()
    ]
    if log is None:
        return found
    if not log.is_connected:
        return [*found, "The shared log cannot be reached: this sidecar learns only from its own engines."]
    if log.lag_s > MAX_LOG_LAG_S:
        found.append(f"This sidecar reads the shared log {units.duration(log.lag_s)} late.")
    if log.gaps:
        found.append(
            "Entries of the shared log were trimmed before this sidecar read them: raise log.max_tokens, "
            "or load a snapshot of another sidecar."
        )
    if log.dropped_tokens:
        found.append(f"Tokens that were never written to the shared log: {units.count(log.dropped_tokens)}.")
    return found


def by_saving(report: Report) -> list[NamespaceReport]:
    """Return the namespaces, sorted by the number of steps that they saved, most first."""
    return sorted(report.namespaces, key=lambda namespace: (-namespace.drafting.saved_steps, namespace.name))
