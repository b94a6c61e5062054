"""Card of a trained head: data, recipe, time and acceptance."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from drafter_service.observability.measuring.results import cpu_name
from engine.models.shipped import SHIPPED_MODEL
from engine.training.acceptance import MAX_TOKENS, TREE_NODES, Acceptance
from engine.training.recipe import Recipe
from engine.training.run import Run

CARD_FILE = "README.md"
LICENSE_FILE = "LICENSE.txt"

NETWORKS = {
    "draft-model": "A copy of the target with {recipe.num_layers} of its layers; its embeddings are not trained",
    "mtp": "A multi-token prediction layer in MiMo's form: one decoder layer over the last state and the next token",
    "eagle": "An EAGLE head: one decoder layer over the last state and the next token",
    "eagle3": "An EAGLE-3 head: one decoder layer over three of the target's states and the next token",
    "medusa": "Medusa heads: {recipe.depth} residual blocks with output projections, on the last state",
}
FIRST_WEIGHTS = {
    "draft-model": "the target's layers, evenly spaced",
    "mtp": "the target's last layer, and a projection that estimates its input by least squares",
    "eagle": "the target's last layer, and a projection that estimates its input by least squares",
    "eagle3": "the target's last layer, with projections that estimate its input by least squares",
    "medusa": "the target's output projection of a state that is estimated by least squares",
}


def write_card(
    folder: Path,
    run: Run,
    *,
    target: Path,
    data: str,
    tokens: int,
    results: Sequence[Acceptance],
    prompts: int,
) -> None:
    """Write the card into `folder`, and the target's license file if it has one.

    data: description of the text. tokens: number of its tokens that were used. results: measured on `prompts` prompts.
    """
    recipe, has_license = run.recipe, (target / LICENSE_FILE).exists()
    if has_license:
        shutil.copy(target / LICENSE_FILE, folder / LICENSE_FILE)
    (folder / CARD_FILE).write_text(
        f"""---
{_license(target)}library_name: ssd-drafter
base_model: {target.name}
---

# {recipe.kind} for {target.name}

{NETWORKS[recipe.kind].format(recipe=recipe)}. It drafts for the target {target.name} (`--drafter {recipe.kind}`).
{"The target's license applies (`LICENSE.txt`)." if has_license else ""}

| held-out acceptance | tokens per step | accepted at position 1, 2, .. |
|---|---|---|
{_rows(results)}

{prompts} held-out prompts x {MAX_TOKENS} tokens, one measurement; greedy outputs include loops. {_shape(recipe)}

## Data

{data}: {tokens:,} tokens in windows of {recipe.window}. The labels are the target's own distributions.

## Recipe

| | |
|---|---|
| first weights | {FIRST_WEIGHTS[recipe.kind]} |
| loss | {_loss(recipe)} |
| tokens seen | {recipe.steps * recipe.batch_tokens:,}, {recipe.batch_tokens:,} per step |
| optimizer | Muon for matrices (learning rate {recipe.matrix_lr}), AdamW for the rest ({recipe.other_lr}) |
| schedule | {recipe.warmup_steps} steps of warm-up, then linear to zero |
| precision | float32; written as bfloat16 |
| hardware | {cpu_name()}, threads: {torch.get_num_threads()} |
| time | {run.seconds / 60:.0f} minutes, {run.cpu_seconds / 60:.0f} minutes of processor time |

Made by `ssd-engine train {recipe.kind}`.
""",
        encoding="utf-8",
    )


def _license(target: Path) -> str:
    return "license: other\nlicense_name: psf-2.0\n" if target == SHIPPED_MODEL else ""


def _rows(results: Sequence[Acceptance]) -> str:
    return "\n".join(
        f"| temperature {result.temperature:g} | {result.tokens_per_step:.2f} "
        f"| {', '.join(f'{share:.2f}' for share in result.by_position)} |"
        for result in results
    )


def _shape(recipe: Recipe) -> str:
    return f"Trees of {TREE_NODES} nodes." if recipe.kind == "medusa" else "Paths."


def _loss(recipe: Recipe) -> str:
    if recipe.kind in ("draft-model", "medusa"):
        return "cross-entropy with the target's distribution"
    return (
        f"cross-entropy with the target's distribution at {recipe.depth} draft positions (training-time test); chains "
        f"of several begin at the {recipe.chain_share:.0%} of rows whose first draft is most likely to be accepted"
    )
