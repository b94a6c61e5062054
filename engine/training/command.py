"""`ssd-engine train KIND`: train a draft head or a draft model for a target and write its folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from engine.commands.prompts import read_prompt_file
from engine.models.decoder import Decoder
from engine.models.heads.formats import save_head
from engine.models.heads.head import DraftHead
from engine.models.heads.medusa import MedusaHeads
from engine.models.loader import load_model, save_model
from engine.models.shipped import PROMPTS_FILE, SHIPPED_MODEL
from engine.models.tokenizer import TOKENIZER_FILE, Tokenizer
from engine.training.acceptance import (
    MAX_PROMPT_TOKENS,
    PROMPTS,
    TEMPERATURES,
    Acceptance,
    Measurement,
)
from engine.training.card import write_card
from engine.training.data import Text, end_token, file_text, library_text, own_outputs
from engine.training.features import Features
from engine.training.kinds import needed_layers
from engine.training.recipe import RECIPES, Recipe
from engine.training.run import Run, resume, train
from ssd.errors import UserError

OWN_OUTPUTS = "self"
"""`--data` for the target's own outputs."""
MEASUREMENTS = 4
"""Number of times that the acceptance is measured in a run, the last time at its end."""


@dataclass(frozen=True)
class TrainingOptions:
    """Options of `ssd-engine train KIND`."""

    kind: str
    target: Path
    out: Path
    work: Path
    data: tuple[str, ...] = ()
    """Text files, or `OWN_OUTPUTS`; none: the library that the shipped target was trained on."""
    prompts: tuple[Path, ...] = ()
    """Files with prompts for the target's own outputs."""
    tokens: int | None = None
    """Number of tokens to train on; None: the recipe's."""

    def __post_init__(self) -> None:
        """Raise UserError for options that do not fit together."""
        if self.kind not in RECIPES:
            raise UserError(f"unknown kind {self.kind!r}; give one of {', '.join(RECIPES)}")
        wants_outputs = OWN_OUTPUTS in self.data
        if wants_outputs and len(self.data) > 1:
            raise UserError(f"--data {OWN_OUTPUTS} cannot be combined with files; give one of them")
        if wants_outputs != bool(self.prompts):
            raise UserError(
                f"--prompts FILE and --data {OWN_OUTPUTS} need each other: the target continues the prompts"
            )
        if not self.data and self.target != SHIPPED_MODEL:
            raise UserError(f"give --data text files, or --data {OWN_OUTPUTS} with --prompts FILE")
        if self.out.exists() and self.target.exists() and self.out.samefile(self.target):
            raise UserError(f"--out {self.out} is the target's folder; give another")


def train_head(options: TrainingOptions, console: Console, recipe: Recipe | None = None) -> Acceptance:
    """Train a head, write it to `options.out` and return its acceptance at the first of `TEMPERATURES`.

    recipe: None for that of the kind. An interrupted call with the same options is continued from `options.work`.
    Raises UserError for files that cannot be used, and for a work folder with another run.
    """
    recipe = recipe or RECIPES[options.kind]
    target, tokenizer = load_model(options.target), Tokenizer(options.target)
    try:
        recipe = recipe if options.tokens is None else replace(recipe, total_tokens=options.tokens)
        text = _text(options, recipe, target, tokenizer, console)
        windows, held_out = text.windows(recipe.window, recipe.seed)
        layers, needed = needed_layers(recipe.kind, target.config), recipe.steps * recipe.batch_windows
        features = Features.open(options.work, target, layers, windows, needed)
        compute(features, target, console)
        work = options.work / recipe.kind
        run = resume(recipe, target, features, work)
    except ValueError as problem:
        raise UserError(str(problem)) from None
    measurement = Measurement(target, options.target, _held_out_prompts(options.target, tokenizer, held_out))
    console.print(f"training {recipe.kind} from step {run.step:,} of {recipe.steps:,}")
    for part in range(1, MEASUREMENTS + 1):
        _train_until(run, features, work, recipe.steps * part // MEASUREMENTS, console)
        folder = options.out if part == MEASUREMENTS else work / "head"
        write_head(run, folder, options.target)
        results = [measurement.measure(recipe.kind, folder, temperature) for temperature in TEMPERATURES]
        console.print(f"step {run.step:,}: " + "; ".join(map(describe, results)))
    write_card(
        options.out,
        run,
        target=options.target,
        data=_describe_data(options),
        tokens=features.tokens.size,
        results=results,
        prompts=measurement.prompts,
    )
    return results[0]


def _describe_data(options: TrainingOptions) -> str:
    if options.data == (OWN_OUTPUTS,):
        return "The target's own outputs for given prompts, sampled at a temperature of 0.8"
    if options.data:
        return f"{len(options.data)} text files"
    return "The Python standard library, the files that the target was trained on (its `files.json`)"


def describe(result: Acceptance) -> str:
    """Return the result as text, such as `2.46 tokens per step at temperature 0.8`."""
    return f"{result.tokens_per_step:.2f} tokens per step at temperature {result.temperature:g}"


def compute(features: Features, target: Decoder, console: Console) -> None:
    """Compute the features that are missing, with a progress bar."""
    if not features.missing():
        return
    console.print(
        f"hidden states of {features.tokens.size:,} tokens: {features.size / 2**20:,.0f} MiB in {features.folder}"
    )
    free = shutil.disk_usage(features.folder).free
    if free < features.missing_size:
        raise UserError(
            f"{features.folder} needs {features.missing_size / 2**20:,.0f} MiB, but {free / 2**20:,.0f} MiB are free; "
            "give another --work folder or fewer --tokens"
        )
    with _bar("hidden states", features.tokens.size, console) as (progress, task):
        for done in features.compute(target):
            progress.update(task, completed=done)


def write_head(run: Run, folder: Path, target: Path) -> None:
    """Write the weights in a published format."""
    module = run.module
    if isinstance(module, DraftHead | MedusaHeads):
        save_head(module, folder, base_model=target.name)
        return
    assert isinstance(module, Decoder)
    save_model(module, folder)
    for name in (TOKENIZER_FILE, "tokenizer_config.json", "generation_config.json"):
        if (target / name).exists():
            shutil.copy(target / name, folder / name)


def _text(options: TrainingOptions, recipe: Recipe, target: Decoder, tokenizer: Tokenizer, console: Console) -> Text:
    if not options.data:
        return library_text(options.target, tokenizer, end_token(target.config))
    if options.data != (OWN_OUTPUTS,):
        return file_text([Path(path) for path in options.data], tokenizer, end_token(target.config))
    with _bar("outputs", recipe.total_tokens, console) as (progress, task):
        return own_outputs(
            target,
            [prompt.tokens(tokenizer) for path in options.prompts for prompt in read_prompt_file(path)],
            recipe.total_tokens,
            options.work / "outputs",
            lambda done: progress.update(task, completed=done),
        )


def _held_out_prompts(target: Path, tokenizer: Tokenizer, windows: np.ndarray) -> Sequence[np.ndarray]:
    """Return the last prompts of the target's own file if it has one, else the beginnings of held-out windows."""
    path = target / PROMPTS_FILE
    if not path.exists():
        return [window[: min(MAX_PROMPT_TOKENS, len(window) // 2)] for window in windows]
    return [prompt.tokens(tokenizer) for prompt in read_prompt_file(path)[-PROMPTS:]]


def _train_until(run: Run, features: Features, work: Path, step: int, console: Console) -> None:
    with _bar(run.recipe.kind, run.recipe.steps, console, "tokens per step {task.fields[rate]:.2f}") as (
        progress,
        task,
    ):
        train(
            run,
            features,
            work,
            until=step,
            progress=lambda run: progress.update(task, completed=run.step, rate=run.tokens_per_step),
        )


@contextmanager
def _bar(name: str, total: int, console: Console, more: str = "") -> Iterator[tuple[Progress, TaskID]]:
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn(more), console=console, transient=True) as progress:
        yield progress, progress.add_task(name, total=total, rate=1.0)
