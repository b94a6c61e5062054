"""The whole making of the shipped target: text, training, scores, and a model folder to ship."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from engine.models.generation import GENERATION_FILE
from engine.models.loader import load_model, save_model
from engine.models.shipped import PROMPTS_FILE
from engine.models.tokenizer import TOKENIZER_FILE
from engine.training.card import score_model, score_ngram, write_card
from engine.training.corpus import FILES_FILE, TrainingText, held_out_files, prepare
from engine.training.prompts import function_prompts, write_prompts
from engine.training.sources import read_files, stdlib_root
from engine.training.target import Recipe, Run, resume, train
from engine.training.vocabulary import END_OF_TEXT, end_of_text

LICENCE_FILE = "LICENSE.txt"
"""The Python licence, which goes with the library's text; CPython puts it beside the library."""


def train_target(
    recipe: Recipe,
    work: Path,
    out: Path,
    *,
    compiled: bool,
    say: Callable[[str], None],
    progress: Callable[[int, float], None],
) -> None:
    """Train by `recipe` in the folder `work`, from its last checkpoint if it has one, and write the model to `out`.

    `say` gets a line for each stage, `progress` the steps done and their loss.
    Raises ValueError if `work` belongs to another recipe.
    """
    text = prepare(work, recipe.vocab_size, say)
    run = resume(recipe, recipe.model_config(end_of_text(text.tokenizer)), work)
    say(f"training from step {run.step:,} of {recipe.steps:,}")
    train(run, text, work, compiled=compiled, progress=progress)
    say(f"writing {out}")
    _write_folder(run, text, work, out)
    say("scoring the shipped weights on the held-out files")
    # From the folder, since the weights were rounded on their way into it.
    model = score_model(load_model(out), text)
    say(f"perplexity {model.perplexity:.2f}, {model.bits_per_byte:.3f} bits per byte; counting n-grams")
    ngram = score_ngram(text, recipe.vocab_size)
    say(f"the n-gram model: perplexity {ngram.perplexity:.2f}, {ngram.bits_per_byte:.3f} bits per byte")
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
    licence = stdlib_root() / LICENCE_FILE
    if licence.exists():
        shutil.copy(licence, out / LICENCE_FILE)
    held_out = held_out_files(read_files(stdlib_root()), text.files["held_out"])
    write_prompts(function_prompts(held_out, text.tokenizer), out / PROMPTS_FILE)


def _write_json(path: Path, fields: dict[str, object]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n")
