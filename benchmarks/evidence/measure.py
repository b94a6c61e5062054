"""Replay a trace with all drafters that are installed, and keep what the tables need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.support.drafters import Candidate, own_candidates, starting_from
from benchmarks.support.peers import PEERS, missing, peer_candidates
from benchmarks.support.scores import Row, best_rows, blocks, row_of
from ssd.replay import Recording

OUTPUT_TOKENS = 20_000
"""Output tokens of each trace that are replayed."""
COSTS = (0.005, 0.02, 0.05, 0.1)
OWN_K = 32
"""Most tokens in a draft of ssd, which ends earlier where tokens are not worth their cost."""
OTHER_KS = (8, 16, 32)
SHORT_K = 16
SHORT_COST = COSTS[0]
"""Drafts of replays like Spec-Bench's, which do not count the cost of verifying more tokens."""
CONCURRENT = 16
CONCURRENT_DRAFTERS = ("ssd", "arctic", "sglang-ngram", "suffix-automata")
KEPT = (
    *("trace", "drafter", "setting", "shape", "k", "cost", "concurrency", "output_tokens"),
    *("tokens_per_step", "drafted_per_step", "S", "ece", "blocks"),
)
"""Columns of the results. Durations are left out: `benchmarks.index` measures them under the same conditions."""

Sections = dict[str, list[Row]]


def skipped() -> dict[str, str]:
    """Return the drafters that cannot be replayed, with reasons."""
    return {peer: reason for peer in PEERS if (reason := missing(peer))}


def sections_of(trace: Recording, prior: Path, note: Callable[[str], None]) -> Sections:
    """Replay a trace and return rows by section.

    prior: file of SSD's start values. note: called before each replay with its description.

    `single`: the best setting of each drafter for each cost, one request at a time. `concurrent`: the same with
    `CONCURRENT` requests at once; other drafters in the settings that were best for single requests. `short`: drafts of
    at most `SHORT_K` tokens. `known`: the same after all requests were replayed before.
    """

    # The kernels take seconds to import.
    from benchmarks.support.replaying import replay

    def cold(candidate: Candidate, concurrency: int = 1) -> list[Row]:
        note(f"{trace.name} x{concurrency}: {candidate.drafter} {candidate.setting}")
        tally = replay(candidate, trace, concurrency)
        counted = {"blocks": blocks(tally)}
        return [row_of(trace.name, candidate, cost, concurrency, tally) | counted for cost in _costs(candidate)]

    def known(candidate: Candidate) -> Row:
        note(f"{trace.name} again: {candidate.drafter} {candidate.setting}")
        return row_of(trace.name, candidate, SHORT_COST, 1, replay(candidate, trace, times=2))

    candidates = all_candidates(prior)
    rows = [row for candidate in candidates for row in cold(candidate)]
    single = best_rows(rows)
    chosen = {(row["drafter"], row["setting"]) for row in single if row["drafter"] in CONCURRENT_DRAFTERS}
    concurrent = [row for candidate in candidates if _key(candidate) in chosen for row in cold(candidate, CONCURRENT)]
    own_short = _own(prior, SHORT_K, [SHORT_COST])
    rows += [row for candidate in own_short for row in cold(candidate)]
    short = best_rows([row for row in rows if row["k"] == SHORT_K and row["cost"] == SHORT_COST])
    by_setting = {_key(candidate): candidate for candidate in [*candidates, *own_short]}
    again = [known(by_setting[row["drafter"], row["setting"]]) for row in short]
    return {
        name: [{column: row[column] for column in KEPT if column in row} for row in section]
        for name, section in {
            "single": single,
            "concurrent": best_rows(concurrent),
            "short": short,
            "known": again,
        }.items()
    }


def all_candidates(prior: Path) -> list[Candidate]:
    """Return all settings of all drafters that are installed; prior: file of SSD's start values."""
    candidates = _own(prior, OWN_K, COSTS)
    for name in ("classic", "ngram"):
        candidates += own_candidates(name, OTHER_KS, (), ())
    for name in PEERS:
        if not missing(name):
            candidates += peer_candidates(name, OTHER_KS)
    return candidates


def _own(prior: Path, k: int, costs: Sequence[float]) -> list[Candidate]:
    return [starting_from(candidate, prior) for candidate in own_candidates("ssd", [k], ("path", "tree"), costs)]


def _costs(candidate: Candidate) -> Sequence[float]:
    """Return the costs that one replay covers."""
    return COSTS if candidate.cost is None else (candidate.cost,)


def _key(candidate: Candidate) -> tuple[str, str]:
    return candidate.drafter, candidate.setting
