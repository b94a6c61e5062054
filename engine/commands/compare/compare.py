"""`ssd-engine compare`: run drafters on the same prompts, and recommend one."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape

from drafter_service.observability.measuring.results import prepare, versions, write
from drafter_service.observability.pages.tables import console_table
from engine.commands.compare.page import notes, render_markdown, render_page, table_of
from engine.commands.compare.profile import measure_steps
from engine.commands.compare.results import MIN_PROMPTS, Comparison, Condition, Result
from engine.commands.compare.rows import Row, unusable
from engine.commands.compare.trial import BATCH, Trial, Workload
from engine.commands.launch import load
from engine.commands.options import CompareFlags, EngineOptions
from engine.commands.progress import LongProgress, StoppedError, deferred_interruption
from engine.commands.prompts import LINES, load_chat, read_prompt_file
from engine.config import ContextWindow, Verification
from engine.models.loader import load_config
from engine.models.shipped import PROMPTS_FILE
from engine.models.tokenizer import Tokenizer
from engine.scheduling.report import StepReport
from engine.scheduling.request import Request, SamplingParams
from ssd.budget.cost_profile import CostProfile
from ssd.budget.roofline import roofline
from ssd.errors import UserError

EXACT: tuple[Verification, ...] = ("exact",)
PACKAGES = ("ssd-drafter", "torch", "numpy", "numba", "grpcio")
NAME = "compare"
"""Name of the files, without their endings."""


def rows_by_condition(options: CompareFlags, rows: Sequence[Row]) -> dict[Condition, list[Row]]:
    """Return the rows to run under each condition.

    Greedy decoding and drafters that do not sample give the same with both kinds of verification, and run with one.
    """
    found = {}
    for temperature in options.temperatures:
        for concurrency in options.concurrency:
            for verification in options.verifications if temperature > 0 else EXACT:
                is_repeated = verification == "rejection" and "exact" in options.verifications
                condition = Condition(verification, temperature, concurrency)
                found[condition] = [row for row in rows if row.samples_q or not is_repeated]
    return found


def run_comparison(options: CompareFlags, rows: Sequence[Row], engine: EngineOptions) -> bool:
    """Run the comparison and write its reports; return whether no output differs that must equal that of `none`.

    Raises UserError.
    """
    predicted_for = None
    if options.cost_profile is not None:
        predicted_for = CostProfile.read(options.cost_profile)
    elif options.gpu is not None:
        predicted_for = roofline(options.gpu, options.model_size)
    tokenizer = Tokenizer(engine.folder)
    workload = read_workload(options, engine.folder, tokenizer)
    reasons = {row.name: unusable(row, engine.draft_folders, engine.folder) for row in rows}
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    prepare(options.out, files_of(NAME))
    console = Console(highlight=False)
    if (prompts := len(workload.measured)) < MIN_PROMPTS:
        console.print(f"note: a recommendation takes at least {MIN_PROMPTS} prompts; there will be none from {prompts}")
    model = load(engine)
    with console.status("measuring steps"):
        profile = measure_steps(model, engine, sorted({1, *options.concurrency, BATCH}))
    comparison = Comparison(settings_of(engine, workload), profile, predicted_for, made_with(), (), skipped)
    usable = rows_by_condition(options, [row for row in rows if row.name not in skipped])
    count = count_outputs(usable, workload)
    # Steps with drafts are longer, and fewer.
    token_ms = mean(profile.step(each, each) / each for each in options.concurrency)
    console.print(
        f"{count:,} outputs of {workload.max_tokens} tokens: about "
        f"{max(1.0, count * workload.max_tokens * token_ms / 60e3):.0f} min. "
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

        trial = Trial(model, tokenizer, engine, workload, warn, advance, check)
        try:
            for results in measure(trial, usable, skipped):
                comparison = replace(comparison, results=results)
                write_reports(
                    replace(comparison, partial=f"Partial: {ended:,} of {count:,} outputs"), options.out, NAME
                )
        except StoppedError as reason:
            comparison = replace(comparison, partial=f"Partial: {reason} after {ended:,} of {count:,} outputs")
    if not any(result.row.name != "none" for result in comparison.results):
        interruption.raise_if_interrupted()
        why = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise UserError(f"no drafter could be measured: {comparison.partial or why}")
    report(comparison, options.out, NAME, console)
    interruption.raise_if_interrupted()
    return comparison.is_exact


def measure(
    trial: Trial, rows_of: Mapping[Condition, Sequence[Row]], skipped: dict[str, str]
) -> Iterator[Sequence[Result]]:
    """Yield all results so far, whenever there are new ones. Add rows that cannot be built, and why, to `skipped`."""
    before: list[Result] = []
    for condition, rows in rows_of.items():
        found: list[Result] = []
        for found in trial.run(rows, condition, skipped.__setitem__) if rows else ():
            yield [*before, *found]
        before += found


def read_workload(options: CompareFlags, folder: Path, tokenizer: Tokenizer) -> Workload:
    """Return the prompts to run. Raises UserError if there are too few, or if the model cannot run one of them."""
    path = options.prompts or folder / PROMPTS_FILE
    if options.prompts is None and not path.is_file():
        raise UserError(f"{folder} has no {PROMPTS_FILE}; give --prompts FILE with {LINES}")
    chat = load_chat(folder, tokenizer) if options.chat else None
    prompts = [prompt.tokens(tokenizer, chat) for prompt in read_prompt_file(path)]
    count = len(prompts) - options.earlier if options.requests is None else options.requests
    if count < 1 or options.earlier + count > len(prompts):
        raise UserError(
            f"{path} has {len(prompts)} prompts, but {options.earlier} earlier and {max(1, count)} measured requests "
            "are wanted; change --warm or --requests"
        )
    used = prompts[: options.earlier + count]
    model = load_config(folder)
    window = ContextWindow(model.max_positions, model.max_positions)
    for number, tokens in enumerate(used, 1):
        try:
            Request(tokens, SamplingParams(options.max_tokens)).check(model)
            window.check(len(tokens), options.max_tokens)
        except UserError as problem:
            raise UserError(f"prompt {number}: {problem}") from None
    return Workload(used[: options.earlier], used[options.earlier :], options.max_tokens)


def settings_of(engine: EngineOptions, workload: Workload) -> dict[str, object]:
    """Return the settings that all results have in common."""
    tokens = np.concatenate([*workload.earlier, *workload.measured])
    return {
        "model": engine.folder.name,
        "device": engine.device,
        "dtype": engine.dtype,
        "prompts": hashlib.sha256(tokens.tobytes()).hexdigest()[:16],
        "earlier_requests": len(workload.earlier),
        "requests": len(workload.measured),
        "max_tokens": workload.max_tokens,
        "max_draft": engine.max_draft,
    }


def made_with() -> dict[str, str]:
    """Return the versions of packages, and the platform, by name."""
    return {**versions(PACKAGES), "platform": f"{platform.machine()}, {torch.get_num_threads()} threads"}


def files_of(name: str) -> list[str]:
    """Return the names of the files of a comparison."""
    return [f"{name}.json", f"{name}.html", f"{name}.md"]


def write_reports(comparison: Comparison, out: Path, name: str) -> None:
    """Write the three files. Raises UserError."""
    contents = (json.dumps(comparison.as_json(), indent=1) + "\n", render_page(comparison), render_markdown(comparison))
    for file, content in zip(files_of(name), contents, strict=True):
        write(out / file, content)


def report(comparison: Comparison, out: Path, name: str, console: Console) -> None:
    """Write the files, and print the tables, what they show, and the recommendation. Raises UserError."""
    write_reports(comparison, out, name)
    if comparison.partial:
        console.print(comparison.partial, markup=False, style="bold yellow")
    for condition in comparison.tables:
        console.print(console_table(*table_of(comparison, condition, console.width), title=str(condition)))
    for note in notes(comparison, console.width):
        console.print(note, markup=False, style="dim")
    console.print(comparison.recommendation(), markup=False, style="bold")
    console.print(f"wrote {', '.join(files_of(name))} into {out}", markup=False)


def count_outputs(rows_of: Mapping[Condition, Sequence[Row]], workload: Workload) -> int:
    """Return the number of outputs that all engines produce together."""
    runs = sum(2 + 2 * len(rows) for rows in rows_of.values() if rows)
    every = [row for rows in rows_of.values() for row in rows]
    earlier = sum(workload.earlier_count(row, verifies_all=each) for row in every for each in (False, True))
    return runs * len(workload.measured) + earlier
