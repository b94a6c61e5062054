"""`ssd-engine compare`: run drafters on the same prompts, and recommend one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape

from drafter_service.observability.measuring.results import prepare, write
from drafter_service.observability.pages.tables import console_table
from engine.commands.compare.page import notes, render_markdown, render_page, table_of
from engine.commands.compare.profile import measure_steps
from engine.commands.compare.results import Comparison, Condition
from engine.commands.compare.rows import Row, unusable
from engine.commands.compare.trial import BATCH, Trial, Workload
from engine.commands.launch import load
from engine.commands.options import EngineOptions
from engine.commands.progress import LongProgress
from engine.commands.prompts import read_prompt_file
from engine.commands.reports import made_with
from engine.config import Verification
from engine.models.loader import load_config
from engine.models.shipped import PROMPTS_FILE
from engine.models.tokenizer import Tokenizer
from engine.scheduling.request import Request, SamplingParams
from ssd.budget.cost_profile import CostProfile
from ssd.errors import UserError

EXACT: tuple[Verification, ...] = ("exact",)
JSON_FILE, PAGE_FILE, TABLE_FILE = "compare.json", "compare.html", "compare.md"


@dataclass(frozen=True)
class CompareOptions:
    """Arguments of the command line; see its help."""

    engine: EngineOptions
    rows: Sequence[Row]
    prompts: Path | None
    """None: the file of prompts in the model's folder."""
    earlier: int
    requests: int | None
    """None: all prompts after the earlier ones."""
    max_tokens: int
    temperatures: Sequence[float]
    concurrency: Sequence[int]
    verifications: Sequence[Verification]
    predicted_for: CostProfile | None
    out: Path

    @property
    def conditions(self) -> list[Condition]:
        """All conditions. Greedy decoding has the same outputs in both modes, so it is run in one of them only."""
        return [
            Condition(verification, temperature, concurrency)
            for temperature in self.temperatures
            for concurrency in self.concurrency
            for verification in (self.verifications if temperature > 0 else EXACT)
        ]

    def rows_of(self, condition: Condition) -> list[Row]:
        """Return the rows to run under a condition. Drafts without q are the same in both modes, so they are run in one
        of them only.
        """
        is_repeated = condition.verification == "rejection" and "exact" in self.verifications
        return [row for row in self.rows if row.samples_q or not is_repeated]


def run_comparison(options: CompareOptions) -> bool:
    """Run the comparison and write its reports; return whether no output differs that must equal that of `none`.

    Raises UserError.
    """
    tokenizer = Tokenizer(options.engine.model)
    workload = read_workload(options, tokenizer)
    reasons = {row.name: unusable(row, options.engine.draft_models, options.engine.model) for row in options.rows}
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    prepare(options.out, (JSON_FILE, PAGE_FILE, TABLE_FILE))
    console = Console(highlight=False)
    model = load(options.engine)
    with console.status("measuring steps"):
        profile = measure_steps(model, options.engine, sorted({1, *options.concurrency, BATCH}))
    comparison = Comparison(settings_of(options, workload), profile, options.predicted_for, made_with(), (), skipped)
    usable = {
        condition: [row for row in options.rows_of(condition) if row.name not in skipped]
        for condition in options.conditions
    }
    with LongProgress(console, _requests(usable, workload)) as progress:

        def warn(text: str) -> None:
            console.print(f"[yellow]warning:[/] {escape(text)}")

        trial = Trial(model, tokenizer, options.engine, workload, warn, progress.advance)
        outputs = {}
        for condition, own in usable.items():
            if not own:
                continue
            plain = replace(condition, verification="exact")
            if plain not in outputs:
                outputs[plain] = trial.baseline(plain)
            results = trial.run(own, condition, outputs[plain], skipped.__setitem__)
            comparison = comparison.with_results(results)
            write_reports(comparison, options.out)  # An interrupted run leaves the conditions that it has completed.
    if not any(result.drafter != "none" for result in comparison.results):
        raise UserError(f"no drafter could be measured: {'; '.join(f'{k}: {v}' for k, v in skipped.items())}")
    write_reports(comparison, options.out)
    _print_report(comparison, console)
    console.print(f"wrote {options.out / JSON_FILE}, {PAGE_FILE} and {TABLE_FILE}", markup=False)
    return all(result.identical is not False for result in comparison.results)


def read_workload(options: CompareOptions, tokenizer: Tokenizer) -> Workload:
    """Return the prompts to run. Raises UserError if there are too few, or if the model cannot run one of them."""
    path = options.prompts or options.engine.model / PROMPTS_FILE
    prompts = [prompt.tokens(tokenizer) for prompt in read_prompt_file(path)]
    count = len(prompts) - options.earlier if options.requests is None else options.requests
    if count < 1 or options.earlier + count > len(prompts):
        raise UserError(
            f"{path} has {len(prompts)} prompts, but {options.earlier} earlier and {max(1, count)} measured requests "
            "are wanted; change --warm or --requests"
        )
    used = prompts[: options.earlier + count]
    model = load_config(options.engine.model)
    for number, tokens in enumerate(used, 1):
        try:
            Request(tokens, SamplingParams(options.max_tokens)).check(model)
        except UserError as problem:
            raise UserError(f"prompt {number}: {problem}") from None
    return Workload(used[: options.earlier], used[options.earlier :], options.max_tokens)


def settings_of(options: CompareOptions, workload: Workload) -> dict[str, object]:
    """Return the settings that all results have in common."""
    tokens = np.concatenate([*workload.earlier, *workload.measured])
    return {
        "model": options.engine.model.name,
        "device": options.engine.device,
        "dtype": options.engine.dtype,
        "prompts": hashlib.sha256(tokens.tobytes()).hexdigest()[:16],
        "earlier_requests": len(workload.earlier),
        "requests": len(workload.measured),
        "max_tokens": workload.max_tokens,
        "max_draft": options.engine.config.max_draft,
    }


def write_reports(comparison: Comparison, out: Path) -> None:
    """Write the three files. Raises UserError."""
    contents = {
        JSON_FILE: json.dumps(comparison.as_json(), indent=1) + "\n",
        PAGE_FILE: render_page(comparison),
        TABLE_FILE: render_markdown(comparison),
    }
    write(out, contents)


def _print_report(comparison: Comparison, console: Console) -> None:
    """Print the tables, what they show, and the recommendation."""
    for condition in comparison.conditions:
        console.print(console_table(*table_of(comparison, condition, console.width), title=str(condition)))
    for note in notes(comparison, console.width):
        console.print(note, markup=False, style="dim")
    console.print(comparison.recommendation(), markup=False, style="bold")


def _requests(rows_of: Mapping[Condition, Sequence[Row]], workload: Workload) -> int:
    """Return the number of requests that all engines run together."""
    measured = len(workload.measured)
    earlier = sum(
        workload.earlier_count(row, verifies_all=verifies_all)
        for rows in rows_of.values()
        for row in rows
        for verifies_all in (False, True)
    )
    baselines = len({(each.temperature, each.concurrency) for each, rows in rows_of.items() if rows})
    rounds = sum(len(rows) + 1 for rows in rows_of.values() if rows)
    return (baselines + rounds + sum(map(len, rows_of.values()))) * measured + earlier
