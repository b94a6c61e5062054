"""`ssd-engine train KIND`: train a draft head or a draft model for a target and write its folder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from drafter_service.client.tokenizer import TOKENIZER_FILE
from engine.commands.options import TrainFlags
from engine.commands.progress import LongProgress
from engine.commands.prompts import read_prompt_file
from engine.models.checkpoint import CONFIG_FILE
from engine.models.decoder import Decoder
from engine.models.folders import read_json
from engine.models.heads.formats import save_head
from engine.models.heads.head import DraftHead
from engine.models.heads.medusa import MedusaHeads
from engine.models.loader import load_config, load_model, save_model
from engine.models.shipped import PROMPTS_FILE, SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from engine.training.acceptance import (
    MAX_PROMPT_TOKENS,
    PROMPTS,
    TEMPERATURES,
    Acceptance,
    measure,
    write_card,
)
from engine.training.data import end_token, file_text, library_text
from engine.training.kinds import KINDS, Recipe
from engine.training.run import Run, resume, train
from ssd.errors import UserError

OF_ALL_LAYERS = ("dtype", "layer_types", "num_nextn_predict_layers", "quantization_config")
"""Fields of a target's `config.json` that do not hold for a draft model."""


def train_head(kind: str, options: TrainFlags, console: Console, recipe: Recipe | None = None) -> Acceptance:
    """Train a head, write it to `options.out` and return its acceptance at the first of `TEMPERATURES`.

    recipe: None for that of the kind. An interrupted call with the same options is continued from `options.work`.
    Raises UserError for options that do not fit together, for files that cannot be used, and for a work folder with
    another run.
    """
    folder, recipe = options.target or SHIPPED_MODEL, recipe or KINDS[kind].recipe
    if not options.data and folder != SHIPPED_MODEL:
        raise UserError("give --data text files")
    if options.out.exists() and folder.exists() and options.out.samefile(folder):
        raise UserError(f"--out {options.out} is the target's folder; give another")
    shape = load_config(folder)
    if KINDS[kind].copies_layer and (shape.experts is not None or shape.latent is not None):
        raise UserError(
            f"a head of the kind {kind} begins with a layer of its target, which may have neither experts nor latent "
            "attention; train medusa or draft-model"
        )
    target, tokenizer = load_model(folder), Tokenizer(folder)
    work = options.work / kind
    try:
        recipe = recipe if options.tokens is None else replace(recipe, total_tokens=options.tokens)
        end = end_token(target.config)
        text = file_text(options.data, tokenizer, end) if options.data else library_text(folder, tokenizer, end)
        windows, held_out = text.windows(recipe.window, recipe.seed)
        run = resume(recipe, target, windows, work)
    except ValueError as problem:
        raise UserError(str(problem)) from None
    console.print(f"training {kind} from step {run.step:,} of {recipe.steps:,}")
    with LongProgress(console, recipe.steps, transient=True, units="steps") as progress:
        progress.advance(run.step, "")
        train(
            run, work, until=recipe.steps,
            progress=lambda run: progress.advance(1, f"tokens per step {run.tokens_per_step:.2f}"),
        )  # fmt: skip
    write_head(run, options.out, folder)
    prompts = _held_out_prompts(folder, tokenizer, held_out)
    results = [measure(kind, options.out, target, folder, prompts, temperature) for temperature in TEMPERATURES]
    for each in results:
        console.print(f"{each.tokens_per_step:.2f} tokens per step at temperature {each.temperature:g}")
    used = min(windows.size, recipe.steps * recipe.batch_tokens)
    facts = {
        "data": f"{len(options.data)} text files" if options.data else "the files that the target was trained on",
        "tokens of the data": f"{used:,}",
        "held-out prompts": str(len(prompts)),
    }
    write_card(options.out, run, folder, facts, results)
    return results[0]


def write_head(run: Run, folder: Path, target: Path) -> None:
    """Write the weights in a published format."""
    module = run.module
    if isinstance(module, DraftHead | MedusaHeads):
        save_head(module, folder, base_model=target.name)
        return
    assert isinstance(module, Decoder)
    fields = read_json(target / CONFIG_FILE)
    save_model(module, folder, {name: fields[name] for name in fields if name not in OF_ALL_LAYERS})
    for name in (TOKENIZER_FILE, "tokenizer_config.json", "generation_config.json"):
        if (target / name).exists():
            shutil.copy(target / name, folder / name)


def _held_out_prompts(target: Path, tokenizer: Tokenizer, windows: np.ndarray) -> Sequence[np.ndarray]:
    """Return at most `PROMPTS` prompts of at most `MAX_PROMPT_TOKENS` tokens each, uint32 [N].

    They are the ends of the last prompts of the target's own file if it has one, else the beginnings of held-out
    windows.
    """
    path = target / PROMPTS_FILE
    if not path.exists():
        return [window[: min(MAX_PROMPT_TOKENS, len(window) // 2)] for window in windows[:PROMPTS]]
    return [prompt.tokens(tokenizer)[-MAX_PROMPT_TOKENS:] for prompt in read_prompt_file(path)[-PROMPTS:]]
