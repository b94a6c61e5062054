"""Figures to reach, and tables of what was reached."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from drafter_service.observability.measuring.results import write
from drafter_service.observability.pages.page import panel
from drafter_service.observability.pages.tables import html_table

Row = dict[str, Any]


class Target(NamedTuple):
    """A figure to reach."""

    sense: Literal["at least", "at most"]
    value: float

    def __str__(self) -> str:
        return f"{self.sense} {self.value:g}"

    def is_met(self, value: float) -> bool:
        """Return whether a value reaches the target."""
        return value >= self.value if self.sense == "at least" else value <= self.value

    def row(self, name: str, value: float) -> Row:
        """Return the target and what was measured, for a document."""
        return {"name": name, "value": value, "sense": self.sense, "target": self.value, "met": self.is_met(value)}


def at_least(value: float) -> Target:
    """Return a target that larger values meet."""
    return Target("at least", value)


def at_most(value: float) -> Target:
    """Return a target that smaller values meet."""
    return Target("at most", value)


def target_panel(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a panel of a page with all targets."""
    lines = [
        (row["name"], f"{row['sense']} {row['target']}", f"{row['value']:.4g}", "reached" if row["met"] else "missed")
        for row in rows
    ]
    return panel(
        "Targets", "", html_table(("target", "", "measured", ""), lines, kinds=("name", "", "", "")), "", "across"
    )


def conclude(name: str, document: Mapping[str, Any], page: str, out: Path) -> NoReturn:
    """Report which targets were reached, write NAME.json and NAME.html, and exit: with 1 if a target was missed.

    The document is also the last line of the output.
    """
    for row in document["targets"]:
        verdict = "reached" if row["met"] else "MISSED "
        line = f"{verdict}  {row['name']}: {row['value']:.4g} ({row['sense']} {row['target']:g})"
        print(line, file=sys.stderr, flush=True)
    write(out, {f"{name}.json": json.dumps(document, indent=1) + "\n", f"{name}.html": page})
    print(f"wrote {out / name}.html", file=sys.stderr, flush=True)
    print(json.dumps(document))
    sys.exit(not all(row["met"] for row in document["targets"]))
