"""Replay recorded traffic with all drafters that are installed, and write the tables of the documentation.

    python -m benchmarks.evidence [--traces build/traces] [--tables-only]

If a trace is one of those that SSD's start values are learned from, they are learned again without it
(`benchmarks.priors --without`), so the others must be there, too. After an interruption the same command continues with
the next trace. Results go to `benchmarks/results/evidence.json`, and the tables made from them into README.md and
docs/drafting.md. `python -m benchmarks.traces fetch all` makes the traces, `make peers` installs Arctic.

Intervals are from a bootstrap: blocks of consecutive requests of each recording are drawn with replacement, the same
ones for all drafters, so that a ratio of two drafters is one of the same requests. What a block's drafts had learned
before is not drawn again. Tables of memory and time are made from files with the last line of `benchmarks.index`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.priors import learn_all, teacher_names, teachers_in, write_left_out
from benchmarks.support import RESULTS, ROOT, Row, new_parser, say, source_commit, with_block
from benchmarks.support.peers import PEERS, missing, peer_candidates
from benchmarks.support.replaying import BLOCKS, PRIOR, Candidate, best_rows, blocks, own_candidates, replay, row_of
from drafter_service.observability.measuring.results import machine, versions
from drafter_service.observability.pages.tables import markdown_table
from ssd.replay import Recording

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

Document = dict[str, Any]
"""Contents of the file of results."""
Form = Callable[[Row], str]
"""Returns a cell of a table."""

NAMES = {
    "ssd tree": "SSD, trees",
    "ssd path": "SSD, paths",
    "arctic": "Arctic Inference's suffix trees",
    "sglang-ngram": "SGLang's n-gram trie *",
    "rest-like": "REST-like datastore *",
    "suffix-automata": "TensorRT-LLM-like suffix automata *",
    "vllm-ngram": "vLLM's n-grams *",
    "pld": "transformers' prompt lookup",
    "ngram": "prompt lookup (`ngram`)",
    "classic": "`classic`",
}
"""Names of drafters in order of the tables; an asterisk marks re-implementations."""
DRAWS = 2000
SHARE = 0.95
"""Share of the draws within an interval."""
RECOMMENDED = "ssd tree"
COST = 0.02
"""Cost at which single recordings are compared."""
INDEX_FILES = {size: f"index-{size.replace(' ', '')}-2026-11-26" for size in ("16 M", "64 M", "256 M", "1 G")}
"""Results of `benchmarks.index` by number of tokens in the corpus."""
INDEX_SIZE = "16 M"
"""Size of the index's targets."""
BRACKETS = f"In brackets: {100 * SHARE:.0f} % intervals, from a bootstrap over {BLOCKS} parts of each recording."

Sections = dict[str, list[Row]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, unless only tables are requested, and update the documentation."""
    parser = new_parser("evidence", __doc__)
    parser.add_argument("--traces", type=Path, default=TRACES, help=f"folder of traces ({TRACES})")
    parser.add_argument("--tables-only", action="store_true", help="make the tables from the last results")
    options = parser.parse_args(arguments)
    file = options.out or FILE
    if not options.tables_only:
        paths = sorted(options.traces.glob("*.npz"))
        if not paths:
            parser.error(f"{options.traces} has no traces; `python -m benchmarks.traces fetch all` makes them")
        try:
            teachers = teachers_in(options.traces) if {path.stem for path in paths} & {*teacher_names()} else {}
        except ValueError as error:
            parser.error(str(error))
        document = measure(paths, teachers, PARTS, say)
        for name, reason in document["skipped"].items():
            print(f"skipped {name}: {reason}")
        write(document, file)
        print(f"wrote {file}")
    document = json.loads(file.read_text())
    for path in PLACES:
        path.write_text(updated(path, document))
        print(f"updated {path}")


def measure(paths: Sequence[Path], teachers: Mapping[str, Path], parts: Path, note: Callable[[str], None]) -> Document:
    """Replay traces and return the document of results. Raises ValueError for a file that is not a trace.

    teachers: see `benchmarks.priors.teachers_in`; SSD starts in each of them from values that the others taught, and in
    other traces from the shipped ones. parts: folder for the results of each trace; those of the same commit and
    versions are not measured again. note: called before each replay with its description.
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
            trace = Recording.load(path).first(OUTPUT_TOKENS)
            kept = {"made_with": made_with, "sections": sections_of(trace, left_out.get(path.stem, PRIOR), note)}
            part.write_text(json.dumps(kept))
        for name, rows in kept["sections"].items():
            sections.setdefault(name, []).extend(rows)
    held_out = sorted(path.stem for path in paths if path.stem not in teachers)
    skipped = {peer: reason for peer in PEERS if (reason := missing(peer))}
    return {**machine(), **made_with, "held_out": held_out, "skipped": skipped, "sections": sections}


def write(document: Document, path: Path) -> None:
    """Write a document, a row on each line."""
    head = {name: value for name, value in document.items() if name != "sections"}
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    sections = [
        f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, rows)) + "\n]"
        for name, rows in document["sections"].items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + ',\n"sections": {\n' + ",\n".join(sections) + "\n}\n}\n")


def sections_of(trace: Recording, prior: Path, note: Callable[[str], None]) -> Sections:
    """Replay a trace and return rows by section.

    prior: file of SSD's start values. note: called before each replay with its description.

    `single`: the best setting of each drafter for each cost, one request at a time. `concurrent`: the same with
    `CONCURRENT` requests at once; other drafters in the settings that were best for single requests. `short`: drafts of
    at most `SHORT_K` tokens. `known`: the same after all requests were replayed before.
    """

    def run(candidate: Candidate, concurrency: int = 1, times: int = 1) -> list[Row]:
        note(f"{trace.name} x{concurrency}, replay {times}: {candidate.drafter} {candidate.setting}")
        tally = replay(candidate, trace, concurrency, times=times)
        costs = COSTS if candidate.cost is None else (candidate.cost,)
        counted = {"blocks": blocks(tally.counts)} if times == 1 else {}
        return [row_of(trace.name, candidate, cost, concurrency, tally) | counted for cost in costs]

    candidates = all_candidates(prior)
    rows = [row for candidate in candidates for row in run(candidate)]
    single = best_rows(rows)
    chosen = {(row["drafter"], row["setting"]) for row in single if row["drafter"] in CONCURRENT_DRAFTERS}
    concurrent = [
        row
        for candidate in candidates
        if (candidate.drafter, candidate.setting) in chosen
        for row in run(candidate, CONCURRENT)
    ]
    own_short = _own(prior, SHORT_K, [SHORT_COST])
    rows += [row for candidate in own_short for row in run(candidate)]
    short = best_rows([row for row in rows if row["k"] == SHORT_K and row["cost"] == SHORT_COST])
    by_setting = {(candidate.drafter, candidate.setting): candidate for candidate in [*candidates, *own_short]}
    known = [
        next(again for again in run(by_setting[row["drafter"], row["setting"]], times=2) if again["cost"] == SHORT_COST)
        for row in short
    ]
    sections = {"single": single, "concurrent": best_rows(concurrent), "short": short, "known": known}
    return {
        name: [{column: row[column] for column in KEPT if column in row} for row in rows]
        for name, rows in sections.items()
    }


def all_candidates(prior: Path) -> list[Candidate]:
    """Return all settings of all drafters that are installed; prior: file of SSD's start values."""
    candidates = _own(prior, OWN_K, COSTS)
    for name in ("classic", "ngram"):
        candidates += own_candidates(name, OTHER_KS)
    for name in PEERS:
        if not missing(name):
            candidates += peer_candidates(name, OTHER_KS)
    return candidates


def _own(prior: Path, k: int, costs: Sequence[float]) -> list[Candidate]:
    return [*own_candidates("ssd", [k], ("path", "tree"), costs, prior=prior)]


# --- Tables

Table = dict[str, dict[str, Row]]
"""Rows by the drafter's name in `NAMES`, in its order, and by recording."""


def table_of(rows: Sequence[Row], cost: float | None = None) -> Table:
    """Return rows at a cost, or all."""
    table: Table = {name: {} for name in NAMES}
    for row in rows:
        if cost in (None, row["cost"]):
            name = f"ssd {row['shape']}" if row["drafter"] == "ssd" else row["drafter"]
            table[name][row["trace"]] = row
    return {name: rows for name, rows in table.items() if rows}


def summary(document: Document) -> str:
    """Return S at one cost as a mean over the recordings, for the README."""
    table, held_out = table_of(document["sections"]["single"], COST), document["held_out"]
    lines = []
    for name, rows in table.items():
        s = f"{_mean(rows.values(), 'S'):.2f} ({_interval(map(drawn, rows.values()))})"
        ratios = _ratio(table, name), _ratio(table, name, held_out) if held_out else "-"
        lines.append((NAMES[name], s, *ratios, f"{_mean(rows.values(), 'tokens_per_step'):.2f}"))
    head = (
        *("drafter", f"S at a cost of {COST}", "SSD, trees / this", f"SSD, trees / this, {len(held_out)} held out"),
        "tokens per step",
    )
    return f"{markdown_table(head, lines)}\n{BRACKETS}\n{_made_with(document)}"


def by_cost(document: Document) -> str:
    """Return the mean of S for each cost, and the ratio to the recommended drafter."""
    single, concurrent = document["sections"]["single"], document["sections"]["concurrent"]
    return "\n".join(
        (
            "One request at a time:\n",
            _costs(single),
            f"{max(row['concurrency'] for row in concurrent)} requests at once:\n",
            _costs(concurrent),
            BRACKETS,
            _calibration(single),
            "",
            _made_with(document),
        )
    )


def by_trace(document: Document) -> str:
    """Return S, tokens per step and drafted tokens per step for each recording at one cost."""

    def cell(_name: str, row: Row) -> str:
        return f"{row['S']:.2f} ({row['tokens_per_step']:.2f}, {row['drafted_per_step']:.1f})"

    return _matrix(table_of(document["sections"]["single"], COST), cell, document["held_out"])


def known(document: Document) -> str:
    """Return tokens per step with drafts of equal size, cold and with known answers."""
    warm = table_of(document["sections"]["known"])

    def cell(name: str, row: Row) -> str:
        rows = row, warm[name][row["trace"]]
        return "; ".join(f"{each['tokens_per_step']:.2f} ({each['drafted_per_step']:.1f})" for each in rows)

    return _matrix(table_of(document["sections"]["short"]), cell, document["held_out"])


def index_table(_document: Document) -> str:
    """Return all figures for each size."""

    def pair(name: str) -> Form:
        def form(it: Row) -> str:
            values = it[f"{name}_us_p50"], it[f"{name}_us_p99"]
            return " / ".join(f"{value:.{1 if values[1] < 10 else 0}f}" for value in values) + " us"

        return form

    def seconds(*names: str) -> Form:
        return lambda it: " / ".join(f"{s:.2g}" if s < 10 else f"{s:.0f}" for s in (it[f"{n}_s"] for n in names)) + " s"

    def delays(it: Row) -> str:
        values = (it["merge_ms"][size] for size in ("1k", "4k", "64k", "1M"))
        return " / ".join(f"{delay:.1f}" if delay < 10 else f"{delay:.0f}" for delay in values) + " ms"

    table: tuple[tuple[str, Form, str], ...] = (
        ("bytes per token at rest", "{bytes_per_token:.1f}".format_map, "12"),
        ("bytes per token at the peak of a merge", "{peak_bytes_per_token_merging:.1f}".format_map, "16"),
        ("building from scratch, wall / processor time", seconds("build", "build_cpu"), ""),
        ("longest-match search", pair("search"), "4 / 15 us"),
        ("path of 6 tokens", pair("path"), "10 / 60 us"),
        ("tree of 16 tokens", pair("tree16"), "40 / 150 us"),
        ("batch of 64 drafts of 8 tokens, median", "{batch64_us_p50:.0f} us".format_map, "500 us"),
        ("committing an output token", "{feedback_us_per_token:.1f} us".format_map, "3 us"),
        ("delay until 1k / 4k / 64k / 1M new tokens can be drafted", delays, ""),
        ("the same at 50,000 tokens/s, 99th percentile", "{freshness_ms_p99:.0f} ms".format_map, "25 ms"),
        ("path during merges, 99th percentile", "{path_us_p99_while_merging:.0f} us".format_map, "45 us"),
        ("saving a snapshot / copying the file", seconds("snapshot", "copy"), ""),
        ("restoring it / reading the file", seconds("restore", "read"), ""),
    )
    columns = [json.loads((RESULTS / f"{name}.json").read_text()) for name in INDEX_FILES.values()]
    lines = [(label, *map(form, columns), target) for label, form, target in table]
    head = ("tokens in the corpus", *INDEX_FILES, f"target, {INDEX_SIZE}")
    made = ", ".join(f"`{name}.json`" for name in INDEX_FILES.values())
    return f"{markdown_table(head, lines)}\nMedian / 99th percentile. `benchmarks/results/`: {made}.\n"


PLACES: dict[Path, dict[str, Callable[[Document], str]]] = {
    ROOT / "README.md": {"summary": summary},
    ROOT / "docs" / "drafting.md": {"by_cost": by_cost, "by_trace": by_trace, "known": known, "index": index_table},
}
"""The files of the documentation, and the tables of their blocks."""


def updated(path: Path, document: Document) -> str:
    """Return the text of a file of the documentation with the tables of the results."""
    text = path.read_text()
    for name, table in PLACES[path].items():
        text = with_block(text, f"evidence: {name}", table(document))
    return text


def drawn(row: Row) -> np.ndarray:
    """Return S of draws of a row's blocks, float64 [DRAWS]; rows of one recording share the draws."""
    tokens, steps, drafted = np.array(row["blocks"])
    generator = np.random.default_rng(zlib.crc32(row["trace"].encode()))
    chosen = generator.integers(0, len(tokens), (DRAWS, len(tokens)))
    return tokens[chosen].sum(axis=1) / (steps[chosen] + row["cost"] * drafted[chosen]).sum(axis=1)


def interval(values: Iterable[np.ndarray]) -> tuple[float, float]:
    """Return the interval of the geometric mean of recordings' values, each float64 [DRAWS]."""
    means = np.exp(np.mean(np.log([*values]), axis=0))
    low, high = np.quantile(means, ((1 - SHARE) / 2, (1 + SHARE) / 2))
    return float(low), float(high)


def _interval(values: Iterable[np.ndarray]) -> str:
    return "{:.2f} to {:.2f}".format(*interval(values))


def _mean(rows: Iterable[Row], column: str) -> float:
    """Return the geometric mean of a column."""
    return float(np.exp(np.mean([np.log(row[column]) for row in rows])))


def _ratio(table: Table, name: str, traces: Sequence[str] | None = None) -> str:
    """Return the geometric mean of S of the recommended drafter / S of another, with its interval.

    traces: recordings; None: all.
    """
    traces = [*table[name]] if traces is None else traces
    ours, theirs = ([table[each][trace] for trace in traces] for each in (RECOMMENDED, name))
    mean = _mean(ours, "S") / _mean(theirs, "S")
    draws = (drawn(one) / drawn(other) for one, other in zip(ours, theirs, strict=True))
    return f"{mean:.2f}" if name == RECOMMENDED else f"{mean:.2f} ({_interval(draws)})"


def _costs(rows: Sequence[Row]) -> str:
    costs, at_cost = sorted({row["cost"] for row in rows}), table_of(rows, COST)
    lines = []
    for name in at_cost:
        means = (f"{_mean(table_of(rows, cost)[name].values(), 'S'):.3f}" for cost in costs)
        least = min(at_cost[RECOMMENDED][trace]["S"] / row["S"] for trace, row in at_cost[name].items())
        lines.append((NAMES[name], *means, _ratio(at_cost, name), f"{least:.2f}"))
    head = ("S", *(f"c = {cost:g}" for cost in costs), f"SSD, trees / this, c = {COST}", "least of a recording")
    return markdown_table(head, lines)


def _calibration(rows: Sequence[Row]) -> str:
    """Return sentences on the size of drafts and the calibration of their probabilities."""
    trees = [table_of(rows, cost)[RECOMMENDED].values() for cost in sorted({row["cost"] for row in rows})]
    sizes = ", ".join(f"{np.mean([row['drafted_per_step'] for row in at_cost]):.1f}" for at_cost in trees)
    errors = {
        shape: max(row["ece"] for row in rows if (row["drafter"], row["shape"]) == ("ssd", shape))
        for shape in ("tree", "path")
    }
    return (
        f"SSD's trees have {sizes} tokens a step at these costs. The largest expected calibration error of any\n"
        f"recording and cost, after its first tenth: {errors['tree']:.3f} for trees, {errors['path']:.3f} for paths."
    )


def _made_with(document: Document) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items() if name != "ssd-drafter")
    count = len({row["trace"] for row in document["sections"]["single"]})
    left_out = "".join(f" Not replayed: {name} ({reason})." for name, reason in document["skipped"].items())
    unseen = f"; nothing was learned from {' and '.join(document['held_out'])}" if document["held_out"] else ""
    return (
        f"`make evidence` on {document['date']}, commit {document['commit']}: {count} recordings,"
        f" {document['output_tokens']:,} output tokens each;\n{versions}.{left_out}\n"
        f"SSD's start values were learned without the recording at hand{unseen}.\n"
    )


def _matrix(table: Table, cell: Callable[[str, Row], str], held_out: Sequence[str]) -> str:
    """Return a table of drafters by recordings, those that taught nothing last."""
    traces = sorted(table[RECOMMENDED], key=lambda trace: (trace in held_out, trace))
    heads = (f"{trace} (held out)" if trace in held_out else trace for trace in traces)
    lines = [(NAMES[name], *(cell(name, rows[trace]) for trace in traces)) for name, rows in table.items()]
    return markdown_table(("", *heads), lines)


if __name__ == "__main__":
    main()
