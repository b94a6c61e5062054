"""Replay recorded traffic with all drafters that are installed, and write the tables of the documentation.

    python -m benchmarks.evidence [--traces build/traces] [--tables-only]

If a trace is one of those that SSD's start values are learned from, they are learned again without it
(`benchmarks.priors --without`), so the others must be there, too. After an interruption the same command continues with
the next trace. Results go to `benchmarks/results/evidence.json`, and the tables made from them into README.md and
docs/drafting.md. `python -m benchmarks.traces fetch all` makes the traces, `make peers` installs Arctic.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.evidence.tables import DOCUMENTS, Document, updated
from benchmarks.priors import PRIOR, learn_all, teacher_names, teachers_in, write_left_out
from benchmarks.support.command import RESULTS, ROOT, new_parser, source_commit
from benchmarks.support.drafters import Candidate, own_candidates, starting_from
from benchmarks.support.peers import PEERS, missing, peer_candidates
from benchmarks.support.scores import Row, best_rows, blocks, row_of
from benchmarks.traces import Trace, load_trace
from drafter_service.observability.measuring.results import machine, versions

TRACES = Path("build/traces")
FILE = RESULTS / "evidence.json"
PARTS = ROOT / "build" / "evidence"
"""Finished traces of a measurement, which continues with the others after an interruption."""
PACKAGES = ("ssd-drafter", "numpy", "numba", "arctic-inference", "transformers")
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, unless only tables are requested, and update the documentation."""
    parser = new_parser("evidence", __doc__)
    parser.add_argument("--traces", type=Path, default=TRACES, help=f"folder of traces ({TRACES})")
    parser.add_argument("--tables-only", action="store_true", help="make the tables from the last results")
    options = parser.parse_args(arguments)
    if not options.tables_only:
        paths = sorted(options.traces.glob("*.npz"))
        if not paths:
            parser.error(f"{options.traces} has no traces; `python -m benchmarks.traces fetch all` makes them")
        try:
            teachers = teachers_in(options.traces) if {path.stem for path in paths} & {*teacher_names()} else {}
        except ValueError as error:
            parser.error(str(error))
        with Console(stderr=True).status("reading traces") as status:
            document = measure(paths, teachers, PARTS, status.update)
        for name, reason in document["skipped"].items():
            print(f"skipped {name}: {reason}")
        write(document)
        print(f"wrote {FILE}")
    for path in DOCUMENTS:
        path.write_text(updated(path.read_text(), read()))
        print(f"updated {path}")


def measure(paths: Sequence[Path], teachers: Mapping[str, Path], parts: Path, note: Callable[[str], None]) -> Document:
    """Replay traces and return the document of results. Raises ValueError for a file that is not a trace.

    teachers: see `benchmarks.priors.teachers_in`; SSD starts in each of them from values that the others taught, and in
    other traces from the shipped ones. parts: folder for the results of each trace; those of the same commit and
    versions are not measured again.
    """
    made_with = {"commit": source_commit(), "versions": versions(PACKAGES), "output_tokens": OUTPUT_TOKENS}
    parts.mkdir(parents=True, exist_ok=True)
    note("learning start values without each trace")
    left_out = write_left_out(learn_all(teachers))
    sections: Sections = {}
    for path in paths:
        part = parts / f"{path.stem}.json"
        kept = json.loads(part.read_text()) if part.exists() else {}
        if kept.get("made_with") != made_with:
            trace = load_trace(path).first(OUTPUT_TOKENS)
            kept = {"made_with": made_with, "sections": sections_of(trace, left_out.get(path.stem, PRIOR), note)}
            part.write_text(json.dumps(kept))
        for name, rows in kept["sections"].items():
            sections.setdefault(name, []).extend(rows)
    held_out = sorted(path.stem for path in paths if path.stem not in teachers)
    skipped = {peer: reason for peer in PEERS if (reason := missing(peer))}
    return {**machine(), **made_with, "held_out": held_out, "skipped": skipped, "sections": sections}


def write(document: Document, path: Path = FILE) -> None:
    """Write a document, a row on each line."""
    head = {name: value for name, value in document.items() if name != "sections"}
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    sections = [
        f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, rows)) + "\n]"
        for name, rows in document["sections"].items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + ',\n"sections": {\n' + ",\n".join(sections) + "\n}\n}\n")


def read(path: Path = FILE) -> Document:
    """Read a document."""
    return json.loads(path.read_text())


def sections_of(trace: Trace, prior: Path, note: Callable[[str], None]) -> Sections:
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
        counted = {"blocks": blocks(tally, trace.traffic().output_lengths)}
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


if __name__ == "__main__":
    main()
