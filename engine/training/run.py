"""`ssd-engine train target`: train the shipped target model and write its folder with scores."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from engine.models.generation import GENERATION_FILE
from engine.models.loader import load_model, save_model
from engine.models.shipped import PROMPTS_FILE
from engine.models.tokenizer import TOKENIZER_FILE
from engine.training.card import score_model, score_ngram, write_card
from engine.training.dataset import END_OF_TEXT, FILES_FILE, TrainingText, end_of_text, prepare
from engine.training.prompts import function_prompts, write_prompts
from engine.training.sources import read_files, stdlib_root
from engine.training.target import Recipe, Run, resume, train
from ssd.errors import UserError

LICENSE_FILE = "LICENSE.txt"
"""The Python license, which applies to the library's text; CPython installs it beside the library."""


def train_with_progress(work: Path, out: Path, tokens: int | None, compiled: bool) -> None:
    """Train to the end of the recipe with a progress bar. Raises UserError if `work` belongs to another recipe."""
    recipe = Recipe() if tokens is None else replace(Recipe(), total_tokens=tokens)
    console = Console()
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]}"), console=console) as progress:
        task = progress.add_task("training", total=recipe.steps, loss="-")
        try:
            train_target(
                recipe,
                work,
                out,
                compiled=compiled,
                notify=console.print,
                progress=lambda step, loss: progress.update(task, completed=step, loss=f"{loss:.3f}"),
            )
        except ValueError as problem:
            raise UserError(str(problem)) from None


def train_target(
    recipe: Recipe,
    work: Path,
    out: Path,
    *,
    compiled: bool,
    notify: Callable[[str], None],
    progress: Callable[[int, float], None],
) -> None:
    """Train by `recipe` in the folder `work`, from its last checkpoint if it has one, and write the model to `out`.

    `notify` is called with a line per stage, `progress` with the number of steps done and their loss.
    Raises ValueError if `work` belongs to another recipe.
    """
    text = prepare(work, recipe.vocab_size, notify)
    run = resume(recipe, recipe.model_config(end_of_text(text.tokenizer)), work)
    notify(f"training from step {run.step:,} of {recipe.steps:,}")
    train(run, text, work, compiled=compiled, progress=progress)
    notify(f"writing {out}")
    _write_folder(run, text, work, out)
    notify("scoring the shipped weights on the held-out files")
    # Loaded from the folder, since saving rounds the weights.
    model = score_model(load_model(out), text)
    notify(f"perplexity {model.perplexity:.2f}, {model.bits_per_byte:.3f} bits per byte; counting n-grams")
    ngram = score_ngram(text, recipe.vocab_size)
    notify(f"the n-gram model: perplexity {ngram.perplexity:.2f}, {ngram.bits_per_byte:.3f} bits per byte")
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    write_card(out, recipe, text, model, ngram, parameters=parameters, seconds=run.seconds)


def _write_folder(run: Run, text: TrainingText, work: Path, out: Path) -> None:
    save_model(run.model, out, dtype=torch.bfloat16)
    shutil.copy(work / TOKENIZER_FILE, out / TOKENIZER_FILE)
    shutil.copy(work / FILES_FILE, out / FILES_FILE)
    end = end_of_text(text.tokenizer)
    _write_json(out / GENERATION_FILE, {"bos_token_id": end, "eos_token_id": end})
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "model_max_length": run.recipe.max_positions,
        },
    )
    license_file = stdlib_root() / LICENSE_FILE
    if license_file.exists():
        shutil.copy(license_file, out / LICENSE_FILE)
    by_path = {file.path: file for file in read_files(stdlib_root())}
    held_out = [by_path[path] for path in text.files["held_out"]]
    write_prompts(function_prompts(held_out, text.tokenizer), out / PROMPTS_FILE)


def _write_json(path: Path, fields: dict[str, object]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n")
