"""Tables of the documentation, made from the file of results and written between markers.

Intervals are from a bootstrap: blocks of consecutive requests of each recording are drawn with replacement, the same
ones for all drafters, so that a ratio of two drafters is one of the same requests. What a block's drafts had learned
before is not drawn again. Tables of memory and time are made from files with the last line of `benchmarks.index`.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.support.command import RESULTS, ROOT
from benchmarks.support.scores import BLOCKS, Row
from drafter_service.observability.pages.tables import markdown_table

Document = dict[str, Any]
"""Contents of the file of results."""

DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "drafting.md")
"""Documents that have blocks of evidence."""
BLOCK = re.compile(r"(<!-- evidence: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

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


def updated(text: str, document: Document) -> str:
    """Return a text with its blocks replaced by those of the results. Raises KeyError for an unknown block."""

    def block(match: re.Match[str]) -> str:
        return match[1] + BLOCKS[match[2]](document) + match[3]

    return BLOCK.sub(block, text)


def summary(document: Document) -> str:
    """Return S at one cost as a mean over the recordings, for the README."""
    rows = _at(document["sections"]["single"], COST)
    held_out = [row for row in rows if row["trace"] in document["held_out"]]
    lines = []
    for name in _names(rows):
        theirs = _of(rows, name)
        s = f"{_geometric([row['S'] for row in theirs]):.2f} ({_range(interval_of_s(theirs))})"
        tokens = f"{_geometric([row['tokens_per_step'] for row in theirs]):.2f}"
        lines.append((NAMES[name], s, _ratio(rows, name), _ratio(held_out, name) if held_out else "-", tokens))
    count = len(document["held_out"])
    head = (
        *("drafter", f"S at a cost of {COST}", "SSD, trees / this", f"SSD, trees / this, {count} held out"),
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
    rows = _at(document["sections"]["single"], COST)

    def cell(row: Row) -> str:
        return f"{row['S']:.2f} ({row['tokens_per_step']:.2f}, {row['drafted_per_step']:.1f})"

    return _matrix(rows, cell, document["held_out"])


def known(document: Document) -> str:
    """Return tokens per step with drafts of equal size, cold and with known answers."""
    cold, warm = document["sections"]["short"], document["sections"]["known"]

    def cell(row: Row) -> str:
        again = next(other for other in warm if _key(other) == _key(row))
        return (
            f"{row['tokens_per_step']:.2f} ({row['drafted_per_step']:.1f});"
            f" {again['tokens_per_step']:.2f} ({again['drafted_per_step']:.1f})"
        )

    return _matrix(cold, cell, document["held_out"])


def index_table(_document: Document) -> str:
    """Return all figures for each size."""
    columns = {size: _figures(size) for size in INDEX_FILES}
    lines = [
        (label, *(form(figures) for figures in columns.values()), target)
        for label, form, target in (
            ("bytes per token at rest", lambda it: f"{it['bytes_per_token']:.1f}", "12"),
            ("bytes per token at the peak of a merge", lambda it: f"{it['peak_bytes_per_token_merging']:.1f}", "16"),
            ("building from scratch, wall / processor time", lambda it: _seconds(it, "build", "build_cpu"), ""),
            ("longest-match search", lambda it: _pair(it, "search"), "4 / 15 us"),
            ("path of 6 tokens", lambda it: _pair(it, "path"), "10 / 60 us"),
            ("tree of 16 tokens", lambda it: _pair(it, "tree16"), "40 / 150 us"),
            ("batch of 64 drafts of 8 tokens, median", lambda it: f"{it['batch64_us_p50']:.0f} us", "500 us"),
            ("committing an output token", lambda it: f"{it['feedback_us_per_token']:.1f} us", "3 us"),
            ("delay until 1k / 4k / 64k / 1M new tokens can be drafted", _delays, ""),
            ("the same at 50,000 tokens/s, 99th percentile", lambda it: f"{it['freshness_ms_p99']:.0f} ms", "25 ms"),
            ("path during merges, 99th percentile", lambda it: f"{it['path_us_p99_while_merging']:.0f} us", "45 us"),
            ("saving a snapshot / copying the file", lambda it: _seconds(it, "snapshot", "copy"), ""),
            ("restoring it / reading the file", lambda it: _seconds(it, "restore", "read"), ""),
        )
    ]
    head = ("tokens in the corpus", *INDEX_FILES, f"target, {INDEX_SIZE}")
    made = ", ".join(f"`{name}.json`" for name in INDEX_FILES.values())
    return f"{markdown_table(head, lines)}\nMedian / 99th percentile. `benchmarks/results/`: {made}.\n"


def _figures(size: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{INDEX_FILES[size]}.json").read_text())


def _pair(figures: dict[str, Any], name: str) -> str:
    median, tail = figures[f"{name}_us_p50"], figures[f"{name}_us_p99"]
    return f"{median:.1f} / {tail:.1f} us" if tail < 10 else f"{median:.0f} / {tail:.0f} us"


def _seconds(figures: dict[str, Any], *names: str) -> str:
    seconds = (figures[f"{name}_s"] for name in names)
    return " / ".join(f"{second:.2g}" if second < 10 else f"{second:.0f}" for second in seconds) + " s"


def _delays(figures: dict[str, Any]) -> str:
    delays = (figures["merge_ms"][size] for size in ("1k", "4k", "64k", "1M"))
    return " / ".join(f"{delay:.1f}" if delay < 10 else f"{delay:.0f}" for delay in delays) + " ms"


BLOCKS: dict[str, Callable[[Document], str]] = {
    "summary": summary,
    "by_cost": by_cost,
    "by_trace": by_trace,
    "known": known,
    "index": index_table,
}


def interval_of_s(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the interval of the geometric mean of S; rows: one of each recording, with `blocks`."""
    return _bounds([drawn(row) for row in rows])


def interval_of_ratio(rows: Sequence[Row], others: Sequence[Row]) -> tuple[float, float]:
    """Return the interval of the geometric mean of S / S of the other row of the same recording."""
    of_trace = {row["trace"]: row for row in others}
    return _bounds([drawn(row) / drawn(of_trace[row["trace"]]) for row in rows])


def drawn(row: Row) -> np.ndarray:
    """Return S of draws of a row's blocks, float64 [DRAWS]; rows of one recording share the draws."""
    tokens, steps, drafted = np.array(row["blocks"])
    generator = np.random.default_rng(zlib.crc32(row["trace"].encode()))
    chosen = generator.integers(0, len(tokens), (DRAWS, len(tokens)))
    return tokens[chosen].sum(axis=1) / (steps[chosen] + row["cost"] * drafted[chosen]).sum(axis=1)


def _bounds(values: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the interval of the geometric mean of recordings' values, each float64 [DRAWS]."""
    means = np.exp(np.mean(np.log(values), axis=0))
    low, high = np.quantile(means, ((1 - SHARE) / 2, (1 + SHARE) / 2))
    return float(low), float(high)


def _costs(rows: Sequence[Row]) -> str:
    costs = sorted({row["cost"] for row in rows})
    ours = {row["trace"]: row["S"] for row in _of(_at(rows, COST), RECOMMENDED)}
    lines = []
    for name in _names(rows):
        means = [_geometric([row["S"] for row in _of(_at(rows, cost), name)]) for cost in costs]
        least = min(ours[row["trace"]] / row["S"] for row in _of(_at(rows, COST), name))
        lines.append((NAMES[name], *(f"{mean:.3f}" for mean in means), _ratio(_at(rows, COST), name), f"{least:.2f}"))
    head = ("S", *(f"c = {cost:g}" for cost in costs), f"SSD, trees / this, c = {COST}", "least of a recording")
    return markdown_table(head, lines)


def _ratio(rows: Sequence[Row], name: str) -> str:
    """Return the geometric mean of S of the recommended drafter / S of another, with its interval."""
    ours, theirs = _of(rows, RECOMMENDED), _of(rows, name)
    mean = _geometric([row["S"] for row in ours]) / _geometric([row["S"] for row in theirs])
    return f"{mean:.2f}" if name == RECOMMENDED else f"{mean:.2f} ({_range(interval_of_ratio(ours, theirs))})"


def _range(interval: tuple[float, float]) -> str:
    return "{:.2f} to {:.2f}".format(*interval)


def _calibration(rows: Sequence[Row]) -> str:
    """Return sentences on the size of drafts and the calibration of their probabilities."""
    costs = sorted({row["cost"] for row in rows})
    drafted = [
        _average(row["drafted_per_step"] for row in _at(rows, cost) if _name(row) == RECOMMENDED) for cost in costs
    ]
    errors = {shape: max(row["ece"] for row in rows if _name(row) == f"ssd {shape}") for shape in ("tree", "path")}
    sizes = ", ".join(f"{value:.1f}" for value in drafted)
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


def _matrix(rows: Sequence[Row], cell: Callable[[Row], str], held_out: Sequence[str]) -> str:
    """Return a table of drafters by recordings, those that taught nothing last."""
    traces = sorted({row["trace"] for row in rows}, key=lambda trace: (trace in held_out, trace))
    heads = (f"{trace} (held out)" if trace in held_out else trace for trace in traces)
    cells = {(_name(row), row["trace"]): cell(row) for row in rows}
    lines = [(NAMES[name], *(cells[name, trace] for trace in traces)) for name in _names(rows)]
    return markdown_table(("", *heads), lines)


def _at(rows: Sequence[Row], cost: float) -> list[Row]:
    return [row for row in rows if row["cost"] == cost]


def _name(row: Row) -> str:
    """Return the drafter of a row, with the shape for this project's."""
    return f"ssd {row['shape']}" if row["drafter"] == "ssd" else row["drafter"]


def _key(row: Row) -> tuple[Any, ...]:
    return row["trace"], row["drafter"], row["setting"]


def _names(rows: Sequence[Row]) -> list[str]:
    """Return the drafters of rows in the order of `NAMES`."""
    present = {_name(row) for row in rows}
    return [name for name in NAMES if name in present]


def _of(rows: Sequence[Row], name: str) -> list[Row]:
    """Return a drafter's rows."""
    return [row for row in rows if _name(row) == name]


def _geometric(values: Sequence[float]) -> float:
    return math.exp(_average(map(math.log, values)))


def _average(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
