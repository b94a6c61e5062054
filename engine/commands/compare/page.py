"""The reports of a comparison: tables for the console and in Markdown, and a self-contained HTML page."""

from __future__ import annotations

from html import escape

from drafter_service.observability.pages import page as pages
from drafter_service.observability.pages.tables import html_table, markdown_table, with_bars
from engine.commands.compare.results import Comparison, Condition, Result

SPEEDUP = "speed-up here"
COLUMNS = (
    "drafter",
    "K",
    "shape",
    "tokens per step",
    "outside loops",
    SPEEDUP,
    "range",
    "predicted",
    "best K",
    "outputs",
    "drafted per step",
    "accepted (%)",
    "ms per step",
    "ms per drafted",
)
WIDE_ONLY = ("shape", "accepted (%)", "ms per step", "ms per drafted")
"""Columns that a console of less than `WIDE` characters does not show."""
WIDE = 120
BARS = ("tokens per step", SPEEDUP)
"""Columns that have bars on the page."""
POSITIONS = 4
"""Number of draft positions whose acceptance is shown."""
COST_TOKENS = (1, 2, 4, 8, 16)
"""Sizes of steps whose durations are shown."""
NOTES = {
    "K": "the draft depth; drafts have at most {max_draft} tokens.",
    "tokens per step": "measured while all draft tokens are verified, without the steps that compute a prompt.",
    "outside loops": "tokens per step, for steps that do not start in a loop of the output, at temperature 0.",
    SPEEDUP: "measured with the token budget, as users run it: fewer tokens are drafted and verified where that is "
    "faster. Median over rounds in which every drafter runs the same prompts, after {earlier_requests} earlier ones.",
    "range": "smallest and largest speed-up of a round.",
    "best K": "the depth with the most tokens/s, computed from acceptance and durations here. 0: do not draft. "
    "4+: 4 is the largest depth that was measured; give a larger --depth.",
    "accepted (%)": "share of the steps that accept the draft token at depth 1, 2, ...",
    "ms per step": "median duration of a step, without the time of drafting.",
    "ms per drafted": "time of drafting per verified draft token of a request.",
}
"""Meanings of the columns whose headings do not say enough."""


def notes(comparison: Comparison, width: int = WIDE) -> list[str]:
    """Return sentences that explain the columns that fit into `width` characters, how the figures were measured, and
    why drafters were skipped."""
    if comparison.notes:
        return list(comparison.notes)
    shown = {heading for each in comparison.tables for heading in table_of(comparison, each, width)[0]}
    sentences = [f"{name}: {note.format(**comparison.settings)}" for name, note in NOTES.items() if name in shown]
    if comparison.profile is not None:
        costs = ", ".join(f"{comparison.profile.step(tokens, 1):.2f}" for tokens in COST_TOKENS)
        sentences.append(f"A step of {', '.join(map(str, COST_TOKENS))} tokens of one request takes {costs} ms here.")
    if comparison.predicted_for is not None:
        sentences.append(
            f"Predicted: not measured, but computed for {comparison.predicted_for.label} from the acceptance measured "
            "here, without the token budget."
        )
    return sentences + [f"{name}: {reason}." for name, reason in comparison.skipped.items()]


def table_of(comparison: Comparison, condition: Condition, width: int = WIDE) -> tuple[list[str], list[list[str]]]:
    """Return the column headings and the rows of a condition, without columns that are empty or do not fit into `width`
    characters."""
    rows = [_cells(result, comparison) for result in comparison.tables[condition]]
    for name, reason in comparison.skipped.items():
        cells = {"drafter": name, "outputs": reason.partition(":")[0]}
        rows.append(tuple(cells.get(column, "") for column in COLUMNS))
    used = [
        column
        for column, heading in enumerate(COLUMNS)
        if any(row[column] for row in rows) and (width >= WIDE or heading not in WIDE_ONLY)
    ]
    headings = ["requests" if condition.part else COLUMNS[0], *(COLUMNS[column] for column in used[1:])]
    return headings, [[row[column] for column in used] for row in rows]


def _cells(result: Result, comparison: Comparison) -> tuple[str, ...]:
    target, best = comparison.predicted_for, result.best_depth(comparison.profile)
    figures, row = result.figures, result.row
    positions = figures.accept_by_position
    return (
        row.name,
        str(row.depth) if row.has_depth else "",
        row.shape if figures.drafted_per_step else "",
        f"{figures.tokens_per_step:.2f}",
        _number(figures.tokens_per_step_no_loops),
        "" if result.speedup is None else f"{result.speedup:.2f}x",
        "" if result.speedup_range is None else "{:.2f}-{:.2f}".format(*result.speedup_range),
        "" if target is None else f"{result.predicted(target):.2f}x",
        "" if best is None else f"{best}{'+' if best == len(positions) > 0 else ''}",
        {True: "equal", False: "DIFFERENT", None: ""}[result.identical],
        f"{figures.drafted_per_step:.1f}",
        " ".join(f"{100 * share:.0f}" for share in positions[:POSITIONS]),
        _number(result.step_ms),
        _number(result.ms_per_drafted),
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def render_markdown(comparison: Comparison) -> str:
    """Return the tables in Markdown, as in docs/drafters.md."""
    parts = [f"{comparison.partial}.\n"] if comparison.partial else []
    for condition in comparison.tables:
        parts.append(f"{condition}:\n\n{markdown_table(*table_of(comparison, condition))}")
    return "\n".join([*parts, *(f"{note}\n" for note in notes(comparison))])


def render_page(comparison: Comparison) -> str:
    """Return the HTML page."""
    drafted = [each for each in comparison.results if each.row.name != "none" and each.speedup is not None]
    fastest = max(drafted, key=lambda result: result.speedup or 0.0, default=None)
    cards = [pages.card("outputs of exact verification", "identical" if comparison.is_exact else "DIFFERENT")]
    if fastest is not None and not comparison.conclusion:
        where = f"{fastest.row.name}, {fastest.condition}"
        cards.append(pages.card("largest speed-up here", f"{fastest.speedup:.2f}x", where, kind="green"))
    sections = []
    for condition in comparison.tables:
        heads, rows = table_of(comparison, condition)
        table = html_table(heads, with_bars(heads, rows, BARS))
        sections.append(f"<section><h2>{escape(str(condition))}</h2>{table}</section>")
    main = "".join([pages.cards(cards), *sections, pages.small_print(notes(comparison))])
    title = f"Drafters for {comparison.settings['model']}"
    facts = pages.facts({**comparison.settings, **comparison.versions})
    lead = f"{comparison.partial}. {comparison.recommendation()}" if comparison.partial else comparison.recommendation()
    return pages.page(title, main, facts, lead=lead)
