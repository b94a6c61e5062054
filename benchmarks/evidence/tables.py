"""Tables of the documentation, made from the file of results and written between markers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.evidence.index_tables import index_table
from benchmarks.evidence.results import Document
from benchmarks.support.command import ROOT
from benchmarks.support.scores import Row
from drafter_service.observability.pages.tables import markdown_table

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
RECOMMENDED = "ssd tree"
COST = 0.02
"""Cost at which single recordings are compared."""


def updated(text: str, document: Document) -> str:
    """Return a text with its blocks replaced by those of the results. Raises KeyError for an unknown block."""

    def block(match: re.Match[str]) -> str:
        return match[1] + BLOCKS[match[2]](document) + match[3]

    return BLOCK.sub(block, text)


def summary(document: Document) -> str:
    """Return S at one cost as a mean over the recordings, for the README."""
    rows = _at(document["sections"]["single"], COST)
    ours = _mean(rows, RECOMMENDED, "S")
    lines = [
        (
            NAMES[name],
            f"{(s := _mean(rows, name, 'S')):.2f}",
            f"{ours / s:.2f}x",
            f"{_mean(rows, name, 'tokens_per_step'):.2f}",
        )
        for name in _names(rows)
    ]
    head = ("drafter", f"S at a cost of {COST}", "SSD, trees / this", "tokens per step")
    return markdown_table(head, lines) + "\n" + _made_with(document)


def by_cost(document: Document) -> str:
    """Return the mean of S for each cost, and the ratio to the recommended drafter."""
    single, concurrent = document["sections"]["single"], document["sections"]["concurrent"]
    return "\n".join(
        (
            "One request at a time:\n",
            _costs(single),
            f"{max(row['concurrency'] for row in concurrent)} requests at once:\n",
            _costs(concurrent),
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

    return _matrix(rows, cell)


def known(document: Document) -> str:
    """Return tokens per step with drafts of equal size, cold and with known answers."""
    cold, warm = document["sections"]["short"], document["sections"]["known"]

    def cell(row: Row) -> str:
        again = next(other for other in warm if _key(other) == _key(row))
        return (
            f"{row['tokens_per_step']:.2f} ({row['drafted_per_step']:.1f});"
            f" {again['tokens_per_step']:.2f} ({again['drafted_per_step']:.1f})"
        )

    return _matrix(cold, cell)


BLOCKS: dict[str, Callable[[Document], str]] = {
    "summary": summary,
    "by_cost": by_cost,
    "by_trace": by_trace,
    "known": known,
    "index": lambda _document: index_table(),
}


def _costs(rows: Sequence[Row]) -> str:
    costs = sorted({row["cost"] for row in rows})
    ours = {row["trace"]: row["S"] for row in _at(rows, COST) if _name(row) == RECOMMENDED}
    lines = []
    for name in _names(rows):
        means = [_mean(_at(rows, cost), name, "S") for cost in costs]
        ratios = [ours[row["trace"]] / row["S"] for row in _at(rows, COST) if _name(row) == name]
        lines.append((NAMES[name], *(f"{mean:.3f}" for mean in means), f"{_geometric(ratios):.2f} ({min(ratios):.2f})"))
    return markdown_table(("S", *(f"c = {cost:g}" for cost in costs), f"SSD, trees / this, c = {COST}"), lines)


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
    return (
        f"`make evidence` on {document['date']}, commit {document['commit']}: {count} recordings,"
        f" {document['output_tokens']:,} output tokens each;\n{versions}.{left_out}\n"
    )


def _matrix(rows: Sequence[Row], cell: Callable[[Row], str]) -> str:
    """Return a table of drafters by recordings."""
    traces = sorted({row["trace"] for row in rows})
    cells = {(_name(row), row["trace"]): cell(row) for row in rows}
    lines = [(NAMES[name], *(cells[name, trace] for trace in traces)) for name in _names(rows)]
    return markdown_table(("", *traces), lines)


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


def _mean(rows: Sequence[Row], name: str, column: str) -> float:
    """Return a drafter's geometric mean over the recordings."""
    return _geometric([row[column] for row in rows if _name(row) == name])


def _geometric(values: Sequence[float]) -> float:
    return math.exp(_average(map(math.log, values)))


def _average(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
