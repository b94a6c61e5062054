"""Tables of memory and time, made from files with the last line of `benchmarks.index`."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.support.command import RESULTS
from drafter_service.observability.pages.tables import markdown_table

FILES = {size: f"index-{size.replace(' ', '')}-2026-11-26" for size in ("16 M", "64 M", "256 M", "1 G")}
"""Results by number of tokens in the corpus."""
SIZE = "16 M"
"""Size of the targets."""

Figures = dict[str, Any]


def index_table() -> str:
    """Return all figures for each size."""
    columns = {size: _figures(size) for size in FILES}
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
    head = ("tokens in the corpus", *FILES, f"target, {SIZE}")
    made = ", ".join(f"`{name}.json`" for name in FILES.values())
    return f"{markdown_table(head, lines)}\nMedian / 99th percentile. `benchmarks/results/`: {made}.\n"


def _figures(size: str) -> Figures:
    return json.loads((RESULTS / f"{FILES[size]}.json").read_text())


def _pair(figures: Figures, name: str) -> str:
    median, tail = figures[f"{name}_us_p50"], figures[f"{name}_us_p99"]
    return f"{median:.1f} / {tail:.1f} us" if tail < 10 else f"{median:.0f} / {tail:.0f} us"


def _seconds(figures: Figures, *names: str) -> str:
    seconds = (figures[f"{name}_s"] for name in names)
    return " / ".join(f"{second:.2g}" if second < 10 else f"{second:.0f}" for second in seconds) + " s"


def _delays(figures: Figures) -> str:
    delays = (figures["merge_ms"][size] for size in ("1k", "4k", "64k", "1M"))
    return " / ".join(f"{delay:.1f}" if delay < 10 else f"{delay:.0f}" for delay in delays) + " ms"
