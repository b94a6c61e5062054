"""Whether drafting is worth it, in sentences."""

from __future__ import annotations

from drafter_service.observability.report import units
from drafter_service.observability.report.schema import Drafting, NamespaceReport, Report, ServiceReport, SharedLog

LEAST_GAIN = 0.01
"""Less than this part of the steps is within what a service notices."""
USUAL_COST = 0.02
"""What one more verified token costs where nobody measured it, as a part of a step."""
MOST_LATE_SHARE, LEAST_LATE = 0.001, 100
MOST_CALIBRATION_ERROR = 0.05
LEAST_CALIBRATED = 10_000
"""Fewer draft tokens say little about odds."""
MOST_LOG_LAG_S = 5.0


def saving(drafting: Drafting) -> str:
    """What drafting saves, as the end of a sentence that begins with its name."""
    if drafting.steps == 0:
        return "has not been asked for a draft yet."
    if drafting.drafted == 0:
        return f"has drafted nothing in {units.count(drafting.steps)} steps: nothing that it remembers has come again."
    tokens = f"{units.ratio(drafting.tokens_per_step)} tokens a step, not 1"
    if (drafting.saved_share or 0.0) < LEAST_GAIN:
        return f"saves next to nothing so far: {tokens}."
    return f"saves {units.share(drafting.saved_share)} of the target's steps: {tokens}."


def worth(drafting: Drafting) -> str:
    """Up to which price that pays; empty if nothing was saved."""
    if not drafting.break_even_cost:
        return ""
    speedup = next((estimate.speedup for estimate in drafting.estimates if estimate.cost == USUAL_COST), None)
    limit = f"up to {units.share(drafting.break_even_cost)}" if drafting.break_even_cost < 1 else "at any price"
    return (
        f"{units.ratio(speedup)}x as fast where verifying a token costs {units.share(USUAL_COST)} of a step; "
        f"it pays {limit}."
    )


def remarks(namespace: NamespaceReport) -> list[str]:
    """What somebody should look at."""
    found = []
    steps, clients, error = namespace.drafting.steps, namespace.clients, namespace.calibration.error
    if clients is not None and clients.timeouts > max(LEAST_LATE, MOST_LATE_SHARE * steps):
        found.append(
            f"{units.count(clients.timeouts)} steps of engines went without drafts because the answer came too late: "
            "give the drafter a core of its own, or the clients a longer deadline."
        )
    if error is not None and error > MOST_CALIBRATION_ERROR and namespace.drafting.drafted >= LEAST_CALIBRATED:
        found.append(
            f"Odds are {units.share(error)} off on average: drafts are longer or shorter than pays. "
            "They learn from what engines report as accepted; make sure that they do."
        )
    return found


def service_remarks(report: Report) -> list[str]:
    """The same, of the whole service."""
    log = None if report.service is None else report.service.log
    if log is None:
        return []
    if not log.is_connected:
        return ["The shared log cannot be reached: this replica learns only what it serves itself."]
    found = []
    if log.lag_s > MOST_LOG_LAG_S:
        found.append(f"The shared log is read {units.duration(log.lag_s)} late.")
    if log.gaps:
        found.append(
            "Entries of the shared log were trimmed before this replica read them: let the log hold more, "
            "or load a snapshot of another replica."
        )
    if log.dropped_tokens:
        found.append(f"{units.count(log.dropped_tokens)} tokens never reached the shared log.")
    return found


def service_facts(service: ServiceReport) -> list[str]:
    """What is to be known of the process, in a few words each."""
    facts = [
        f"ssd-drafter {units.printable(service.version)}",
        f"up {units.duration(service.uptime_s)}",
        f"{units.size(service.memory_bytes)} resident",
    ]
    return [*facts, f"{units.count(service.refused)} refused"] if service.refused else facts


def log_facts(log: SharedLog | None) -> list[str]:
    """The shared log on one line, if there is one."""
    if log is None:
        return []
    known = [
        f"{units.count(log.published_tokens)} tokens written",
        f"{units.count(log.consumed_tokens)} read",
        f"{units.duration(log.lag_s)} behind ({units.count(log.lag_entries)} entries)",
    ]
    mishaps = (
        ("duplicates", log.duplicates),
        ("tokens dropped", log.dropped_tokens),
        ("gaps", log.gaps),
        ("errors", log.errors),
    )
    known += [f"{units.count(number)} {name}" for name, number in mishaps if number]
    return [f"shared log: {', '.join(known)}"]


def by_saving(report: Report) -> list[NamespaceReport]:
    """The namespaces, the one that saves most first."""
    return sorted(report.namespaces, key=lambda namespace: (-namespace.drafting.saved_steps, namespace.name))
