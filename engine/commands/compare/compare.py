"""`ssd-engine compare`: run drafters on the same prompts, and recommend one."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from drafter_service.observability.measuring.results import prepare, write
from drafter_service.observability.pages.tables import console_table
from engine.commands.compare.page import notes, render_markdown, render_page, table_of
from engine.commands.compare.profile import measure_steps
from engine.commands.compare.results import MIN_PROMPTS, Comparison, Condition, Result
from engine.commands.compare.rows import Row, unusable
from engine.commands.compare.trial import BATCH, Counted, Trial, Workload
from engine.commands.interruption import StoppedError, deferred_interruption
from engine.commands.launch import load
from engine.commands.options import EngineOptions
from engine.commands.progress import LongProgress
from engine.commands.prompts import load_chat, read_prompt_file
from engine.commands.reports import made_with
from engine.config import ContextWindow, Verification
from engine.models.loader import load_config
from engine.models.shipped import PROMPTS_FILE
from engine.models.tokenizer import Tokenizer
from engine.scheduling.report import StepReport
from engine.scheduling.request import Request, SamplingParams
from ssd.budget.cost_profile import CostProfile
from ssd.errors import UserError

ASSUMED_TOKENS = 2
"""Tokens per step that are assumed before the first result, to estimate the time of runs that verify all drafts."""
START_S = 3.0
"""Seconds in which an engine with a token budget starts, because it measures steps."""
EXACT: tuple[Verification, ...] = ("exact",)
NAME = "compare"
"""Name of the files, without their endings."""


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
    time_limit: float | None = None
    """Number of minutes after which no further step runs."""
    has_chat: bool = False
    """Whether prompts are formatted with the model's chat template."""

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
    prepare(options.out, files_of(NAME))
    console = Console(highlight=False)
    if (prompts := len(workload.measured)) < MIN_PROMPTS:
        console.print(f"note: a recommendation takes at least {MIN_PROMPTS} prompts; there will be none from {prompts}")
    model = load(options.engine)
    with console.status("measuring steps"):
        profile = measure_steps(model, options.engine, sorted({1, *options.concurrency, BATCH}))
    comparison = Comparison(settings_of(options, workload), profile, options.predicted_for, made_with(), (), skipped)
    usable = {
        condition: [row for row in options.rows_of(condition) if row.name not in skipped]
        for condition in options.conditions
    }
    count, seconds = expected_work(usable, workload, profile, options.engine.config.max_draft)
    console.print(
        f"{count:,} outputs of {workload.max_tokens} tokens: about {max(1.0, seconds / 60):.0f} min. "
        "Ctrl-C or --time-limit MINUTES ends the comparison, and keeps the results so far."
    )
    with deferred_interruption() as interruption, LongProgress(console, count, transient=True) as progress:
        began = time.monotonic()
        ended = 0

        def warn(text: str) -> None:
            console.print(f"[yellow]warning:[/] {escape(text)}")

        def advance(requests: int, name: str) -> None:
            nonlocal ended
            ended += requests
            progress.advance(requests, name)

        def check(_report: StepReport) -> None:
            if interruption.signal is not None:
                raise StoppedError("it was interrupted")
            if options.time_limit is not None and time.monotonic() - began > 60 * options.time_limit:
                raise StoppedError(f"it reached its limit of {options.time_limit:g} minutes")

        trial = Trial(model, tokenizer, options.engine, workload, warn, advance, check)
        try:
            for results in measure(trial, usable, skipped):
                comparison = replace(comparison, results=results)
                write_reports(
                    replace(comparison, partial=f"Partial: {ended:,} of {count:,} outputs"), options.out, NAME
                )
                progress.show(_last_table(comparison, console))
        except StoppedError as reason:
            comparison = replace(comparison, partial=f"Partial: {reason} after {ended:,} of {count:,} outputs")
    if not any(result.drafter != "none" for result in comparison.results):
        interruption.raise_if_interrupted()
        why = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise UserError(f"no drafter could be measured: {comparison.partial or why}")
    write_reports(comparison, options.out, NAME)
    print_report(comparison, console)
    console.print(f"wrote {', '.join(files_of(NAME))} into {options.out}", markup=False)
    interruption.raise_if_interrupted()
    return comparison.is_exact


def measure(
    trial: Trial, rows_of: Mapping[Condition, Sequence[Row]], skipped: dict[str, str]
) -> Iterator[Sequence[Result]]:
    """Yield all results so far, whenever there are new ones. Add rows that cannot be built, and why, to `skipped`."""
    before: list[Result] = []
    outputs: dict[Condition, Counted] = {}
    for condition, rows in rows_of.items():
        if not rows:
            continue
        plain = replace(condition, verification="exact")
        if plain not in outputs:
            outputs[plain] = trial.baseline(plain)
        found: list[Result] = []
        for found in trial.run(rows, condition, outputs[plain], skipped.__setitem__):
            yield [*before, *found]
        before += found


def read_workload(options: CompareOptions, tokenizer: Tokenizer) -> Workload:
    """Return the prompts to run. Raises UserError if there are too few, or if the model cannot run one of them."""
    path = options.prompts or options.engine.model / PROMPTS_FILE
    chat = load_chat(options.engine.model, tokenizer) if options.has_chat else None
    prompts = [prompt.tokens(tokenizer, chat) for prompt in read_prompt_file(path)]
    count = len(prompts) - options.earlier if options.requests is None else options.requests
    if count < 1 or options.earlier + count > len(prompts):
        raise UserError(
            f"{path} has {len(prompts)} prompts, but {options.earlier} earlier and {max(1, count)} measured requests "
            "are wanted; change --warm or --requests"
        )
    used = prompts[: options.earlier + count]
    model = load_config(options.engine.model)
    window = ContextWindow(model.max_positions, model.max_positions)
    for number, tokens in enumerate(used, 1):
        try:
            Request(tokens, SamplingParams(options.max_tokens)).check(model)
            window.check(len(tokens), options.max_tokens)
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


def files_of(name: str) -> list[str]:
    """Return the names of the files of a comparison."""
    return [f"{name}.json", f"{name}.html", f"{name}.md"]


def write_reports(comparison: Comparison, out: Path, name: str) -> None:
    """Write the three files. Raises UserError."""
    contents = (json.dumps(comparison.as_json(), indent=1) + "\n", render_page(comparison), render_markdown(comparison))
    write(out, dict(zip(files_of(name), contents, strict=True)))


def print_report(comparison: Comparison, console: Console) -> None:
    """Print the tables, what they show, and the recommendation."""
    if comparison.partial:
        console.print(comparison.partial, markup=False, style="bold yellow")
    for condition in comparison.conditions:
        console.print(console_table(*table_of(comparison, condition, console.width), title=str(condition)))
    for note in notes(comparison, console.width):
        console.print(note, markup=False, style="dim")
    console.print(comparison.recommendation(), markup=False, style="bold")


def _last_table(comparison: Comparison, console: Console) -> Table:
    """Return the table of the condition that is being measured."""
    condition = comparison.conditions[-1]
    return console_table(*table_of(comparison, condition, console.width), title=str(condition))


def expected_work(
    rows_of: Mapping[Condition, Sequence[Row]], workload: Workload, profile: CostProfile, max_draft: int
) -> tuple[int, float]:
    """Return the number of outputs that all engines produce together, and about how long they take, in seconds."""
    measured = len(workload.measured)
    prompt_tokens = sum(map(len, workload.measured)) / measured
    count, seconds, baselines = 0, 0.0, set[tuple[float, int]]()
    for condition, rows in rows_of.items():
        if not rows:
            continue
        at_once, is_first = condition.concurrency, (condition.temperature, condition.concurrency) not in baselines
        baselines.add((condition.temperature, at_once))
        earlier = sum(
            workload.earlier_count(row, verifies_all=verifies_all) for row in rows for verifies_all in (False, True)
        )
        plain = (is_first + 1 + len(rows)) * measured
        count += plain + len(rows) * measured + earlier
        prompt_ms = prompt_tokens * profile.prompt_token_ms
        plain_ms = prompt_ms + workload.max_tokens * profile.step(at_once, at_once) / at_once
        earlier_ms = prompt_ms + workload.max_tokens * profile.step(BATCH, BATCH) / BATCH
        drafted_ms = profile.step(at_once * (1 + max_draft), at_once) / at_once
        counted_ms = prompt_ms + workload.max_tokens / ASSUMED_TOKENS * drafted_ms
        seconds += (plain * plain_ms + len(rows) * measured * counted_ms + earlier * earlier_ms) / 1e3
        seconds += START_S * (1 + len(rows))
    return count, seconds
