"""`ssd-engine train KIND`: train a draft head or a draft model for a target and write its folder."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from drafter_service.client.tokenizer import TOKENIZER_FILE
from engine.commands.options import TrainFlags
from engine.commands.progress import LongProgress
from engine.models.checkpoint import CONFIG_FILE
from engine.models.decoder import Decoder
from engine.models.folders import read_json
from engine.models.heads.formats import save_head
from engine.models.heads.head import DraftHead
from engine.models.heads.medusa import MedusaHeads
from engine.models.loader import load_config, load_model, save_model
from engine.models.shipped import SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from engine.training.data import end_token, file_tokens, library_tokens, windows_of
from engine.training.kinds import KINDS, Recipe
from engine.training.run import Run, resume, train
from ssd.errors import UserError

LICENSE_FILE = "LICENSE.txt"
"""License of a target, which applies to heads that begin with its weights."""
OF_ALL_LAYERS = ("dtype", "layer_types", "num_nextn_predict_layers", "quantization_config")
"""Fields of a target's `config.json` that do not hold for a draft model."""


def train_head(kind: str, options: TrainFlags, console: Console, recipe: Recipe | None = None) -> None:
    """Train a head, write it to `options.out`, and print how to measure it.

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
        tokens = file_tokens(options.data, tokenizer, end) if options.data else library_tokens(folder, tokenizer, end)
        windows = windows_of(tokens, recipe.window, recipe.seed)
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
    console.print(
        f"about {run.tokens_per_step:.2f} tokens per step at the end, on the text of the run; measure it with\n"
        f"ssd-engine compare --model {folder} --drafter {kind} --draft-model {options.out}",
        markup=False, soft_wrap=True,
    )  # fmt: skip


def write_head(run: Run, folder: Path, target: Path) -> None:
    """Write the weights in a published format, and the target's license file if it has one."""
    module = run.module
    folder.mkdir(parents=True, exist_ok=True)
    if (target / LICENSE_FILE).exists():
        shutil.copy(target / LICENSE_FILE, folder / LICENSE_FILE)
    if isinstance(module, DraftHead | MedusaHeads):
        save_head(module, folder, base_model=target.name)
        return
    assert isinstance(module, Decoder)
    fields = read_json(target / CONFIG_FILE)
    save_model(module, folder, {name: fields[name] for name in fields if name not in OF_ALL_LAYERS})
    for name in (TOKENIZER_FILE, "tokenizer_config.json", "generation_config.json"):
        if (target / name).exists():
            shutil.copy(target / name, folder / name)
