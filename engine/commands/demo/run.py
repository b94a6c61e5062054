"""The demonstration from start to end: sidecar, workload, live progress, table, JSON and page."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from drafter_service.client import DrafterClient
from engine.commands.demo.measure import Measurement, measure
from engine.commands.demo.page import COLUMNS, render_page, rows
from engine.commands.demo.sidecar import running_sidecar
from engine.commands.demo.summary import Part, Summary, summarise
from engine.commands.demo.workload import WorkItem
from engine.config import EngineConfig
from engine.drafters.none import NoDrafter
from engine.engine import build_engine
from engine.models.decoder import Decoder
from engine.models.tokenizer import Tokenizer
from engine.scheduling.request import SamplingParams
from ssd.config import DrafterConfig
from ssd.errors import UserError

STEP_DEADLINE_S = 0.25
"""A stalled machine should show as a slow step, not as a draft that is missing."""

SIDECAR_OPTIONS = ("--capacity", "1M")
JSON_FILE, PAGE_FILE = "run.json", "run.html"


def run_demo(
    model: Decoder, tokenizer: Tokenizer, items: Sequence[WorkItem], sampling: SamplingParams, console: Console
) -> tuple[list[Measurement], int]:
    """Run the workload without drafts and with a sidecar from cold; returns the measurements and the late steps.

    Raises UserError if the sidecar goes away, since the figures would be those of something else.
    """
    drafter_config = DrafterConfig()
    config = EngineConfig(max_sequences=1)
    with running_sidecar(*SIDECAR_OPTIONS) as address, _progress(console) as progress:
        client = DrafterClient(address, deadline_s=STEP_DEADLINE_S)
        plain = build_engine(model, config, NoDrafter())
        drafting = build_engine(model, config, client)
        task = progress.add_task("requests", total=len(items), speed="")
        recent: list[Measurement] = []

        def observe(measurement: Measurement) -> None:
            recent.append(measurement)
            part = Part.of(recent[-max(10, len(items) // 10) :])
            rates = f"{part.plain_tokens_per_s:,.0f} -> {part.drafted_tokens_per_s:,.0f} tokens/s"
            progress.update(task, advance=1, speed=f"{rates}, {part.speedup:.2f}x")
            if client.lost is not None:
                raise UserError(f"the sidecar went away in mid-run ({client.lost}); run again")

        with closing(drafting):
            measurements = measure(
                items, tokenizer, plain, drafting, sampling, drafter_config.learned_prompt_tokens, observe
            )
        return measurements, client.timeouts


def prepare_report(out: Path) -> None:
    """Make sure that the report can be written, before minutes are spent on it. Raises UserError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in (JSON_FILE, PAGE_FILE):
            (out / name).open("a").close()
    except OSError as problem:
        raise UserError(f"cannot write to {out}: {problem.strerror}") from None


def write_report(
    measurements: Sequence[Measurement], out: Path, settings: dict[str, object], console: Console
) -> Summary:
    """Print the table and write run.json and run.html into `out`."""
    summary = summarise(measurements)
    versions = _versions()
    console.print(_table(summary))
    last, new = summary.last_tenth, summary.last_tenth_new
    document = {
        "identical": summary.identical,
        "differing_requests": summary.differing,
        "speedup_last_tenth": last.speedup,
        "tokens_per_step_last_tenth": last.tokens_per_step,
        "speedup_last_tenth_new": new.speedup if new else None,
        "tokens_per_step_last_tenth_new": new.tokens_per_step if new else None,
        "loop_share": summary.loop_share,
        "whole": asdict(summary.whole),
        "kinds": {kind: asdict(part) for kind, part in summary.kinds.items()},
        "tenths": [asdict(part) for part in summary.tenths],
        "settings": settings,
        "versions": versions,
        "requests": [asdict(measurement) for measurement in measurements],
    }
    (out / JSON_FILE).write_text(json.dumps(document, indent=1) + "\n")
    notes = {name: str(value) for name, value in {**settings, **versions}.items()}
    (out / PAGE_FILE).write_text(render_page(summary, measurements, notes), encoding="utf-8")
    return summary


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
        console=console,
    )


def _table(summary: Summary) -> Table:
    table = Table(title="by tenth of the workload, and by kind of request", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for head in COLUMNS:
        table.add_column(head, justify="right")
    for group in rows(summary):
        table.add_section()
        for row in group:
            table.add_row(*row)
    return table


def _versions() -> dict[str, str]:
    packages = ("ssd-drafter", "torch", "numpy", "numba", "grpcio")
    return {
        **{package: version(package) for package in packages},
        "python": platform.python_version(),
        "platform": f"{platform.machine()}, {torch.get_num_threads()} threads",
    }
