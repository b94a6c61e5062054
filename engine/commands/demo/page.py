"""The run as one self-contained HTML page: a plot, the figures, nothing loaded from anywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from engine.commands.demo.measure import Measurement
from engine.commands.demo.summary import Part, Summary

WIDTH, HEIGHT = 900, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 20, 55
TICKS = 5

KIND_CLASSES = {"new": "new", "near repeat": "near", "exact repeat": "exact"}

STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #69727d; --rule: #d9dee4; --paper: #fff;
  --with: #0b7a5b; --without: #98a1ab; --new: #2f6fde; --near: #c77d0a; --exact: #0b7a5b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebee; --soft: #9aa4af; --rule: #333b44; --paper: #14181c;
  --with: #35c497; --without: #78828d; --new: #6fa1ff; --near: #f0ad45; --exact: #35c497; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 940px;
  margin: 2.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } p.lead { color: var(--soft); margin-top: 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .8rem; margin: 1.5rem 0; }
.card { border: 1px solid var(--rule); border-radius: 10px; padding: .8rem 1rem; }
.card b { display: block; font-size: 1.6rem; line-height: 1.2; } .card span { color: var(--soft); font-size: .85rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 13px; }
.grid { stroke: var(--rule); } .line { fill: none; stroke-width: 3; stroke-linejoin: round; }
.with { stroke: var(--with); } .without { stroke: var(--without); }
text.with { fill: var(--with); stroke: none; } text.without { fill: var(--soft); stroke: none; }
circle { fill-opacity: .45; } circle.new { fill: var(--new); } circle.near { fill: var(--near); } circle.exact { fill: var(--exact); }
.key { display: flex; flex-wrap: wrap; gap: 1.2rem; color: var(--soft); font-size: .9rem; }
.key i { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .4em; }
table { border-collapse: collapse; width: 100%; margin: 1.5rem 0; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { text-align: right; padding: .35rem .6rem; border-bottom: 1px solid var(--rule); } th { color: var(--soft); font-weight: 500; }
tbody + tbody tr:first-child td { border-top: 2px solid var(--rule); }
footer { color: var(--soft); font-size: .85rem; margin: 2rem 0; }
"""


def render_page(summary: Summary, measurements: Sequence[Measurement], notes: Mapping[str, str]) -> str:
    """The whole page; `notes` are shown at its foot as name and value."""
    last, new = summary.last_tenth, summary.last_tenth_new
    cards = [
        (f"{last.speedup:.2f}x", "speed-up in the last tenth"),
        (f"{new.speedup:.2f}x" if new else "none", "the same, new requests alone"),
        (f"{last.tokens_per_step:.2f}", "tokens per step in the last tenth"),
        ("identical" if summary.identical else "DIFFERENT", "outputs with and without drafts"),
        (f"{summary.loop_share:.0%}", "of the output is a loop"),
    ]
    foot = " · ".join(f"{escape(name)}: {escape(value)}" for name, value in notes.items())
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Tokens per second as the corpus grows</title><style>{STYLE}</style></head>
<body>
<h1>Tokens per second as the corpus grows</h1>
<p class="lead">{summary.whole.requests} requests, one at a time, each run without drafts and with them.</p>
<div class="cards">{"".join(f'<div class="card"><b>{value}</b><span>{name}</span></div>' for value, name in cards)}</div>
{_plot(summary.tenths, measurements)}
<div class="key">{_key()}</div>
{_table(summary)}
<footer>{foot}</footer>
</body></html>
"""


def _plot(tenths: Sequence[Part], measurements: Sequence[Measurement]) -> str:
    rates = [m.output_tokens / m.drafted_s for m in measurements]
    # A few very fast repeats must not flatten everything else; they are drawn at the upper edge.
    most_y = max(max(part.drafted_tokens_per_s for part in tenths) * 1.6, sorted(rates)[int(0.9 * (len(rates) - 1))])
    step_y, step_x = _round_step(most_y), _round_step(measurements[-1].corpus_tokens)
    most_y = step_y * math.ceil(most_y / step_y)
    most_x = max(1, measurements[-1].corpus_tokens)

    def x(tokens: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * tokens / most_x

    def y(rate: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(rate, most_y) / most_y)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Tokens per second by corpus size">']
    parts += [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(rate):.1f}" y2="{y(rate):.1f}"/>'
        f'<text x="{LEFT - 10}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:,}</text>'
        for rate in range(0, most_y + 1, step_y)
    ]
    parts += [
        f'<text x="{x(tokens):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{tokens:,}</text>'
        for tokens in range(0, most_x + 1, step_x)
    ]
    for m, rate in zip(measurements, rates, strict=True):
        title = (
            f"{m.kind}, {m.output_tokens} tokens, {rate:,.0f} tokens/s, {m.output_tokens / m.steps:.1f} tokens per step"
        )
        parts.append(
            f'<circle class="{KIND_CLASSES[m.kind]}" cx="{x(m.corpus_tokens):.1f}" cy="{y(rate):.1f}" r="4">'
            f"<title>{title}</title></circle>"
        )
    for name, label in (("plain", "without drafts"), ("drafted", "with drafts")):
        values = [getattr(part, f"{name}_tokens_per_s") for part in tenths]
        points = " ".join(f"{x(part.corpus_tokens):.1f},{y(v):.1f}" for part, v in zip(tenths, values, strict=True))
        kind = "with" if name == "drafted" else "without"
        parts.append(
            f'<polyline class="line {kind}" points="{points}"/>'
            f'<text class="{kind}" x="{WIDTH - RIGHT}" y="{y(values[-1]) - 10:.1f}" text-anchor="end">{label}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">tokens remembered</text>'
        f'<text transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">tokens/s</text></svg>'
    )
    return "".join(parts)


def _round_step(most: float) -> int:
    """The distance of ticks up to `most`: 1, 2 or 5 times a power of ten, for at most five ticks."""
    power = 10 ** math.floor(math.log10(max(10.0, most) / TICKS))
    return next(int(power * factor) for factor in (1, 2, 5, 10) if power * factor * TICKS >= most or factor == 10)


def _key() -> str:
    spans = [
        f'<span><i style="background: var(--{colour})"></i>{kind}, with drafts</span>'
        for kind, colour in KIND_CLASSES.items()
    ]
    return "".join([*spans, "<span>a dot is one request; dots at the upper edge are faster still</span>"])


COLUMNS = (
    "",
    "corpus tokens",
    "repeats",
    "tokens per step",
    "tokens/s without",
    "tokens/s with",
    "speed-up",
    "accepted",
)


def rows(summary: Summary) -> list[list[tuple[str, ...]]]:
    """The figures as rows of `COLUMNS`: by tenth, by kind of request, and of the whole."""
    tenths = [(str(number), f"{part.corpus_tokens:,}", *_cells(part)) for number, part in enumerate(summary.tenths, 1)]
    kinds = [(kind.removesuffix(" repeat"), "", *_cells(part)) for kind, part in summary.kinds.items()]
    return [tenths, kinds, [("all", "", *_cells(summary.whole))]]


def _cells(part: Part) -> tuple[str, ...]:
    return (
        f"{part.repeat_share:.0%}",
        f"{part.tokens_per_step:.2f}",
        f"{part.plain_tokens_per_s:,.0f}",
        f"{part.drafted_tokens_per_s:,.0f}",
        f"{part.speedup:.2f}x",
        f"{part.acceptance:.0%}",
    )


def _table(summary: Summary) -> str:
    heads = "".join(f"<th>{head}</th>" for head in COLUMNS)
    bodies = "".join(
        "<tbody>" + "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in group) + "</tbody>"
        for group in rows(summary)
    )
    return f"<table><thead><tr>{heads}</tr></thead>{bodies}</table>"
