"""Acceptance of a trained head on held-out prompts, measured with the engine itself, and the card that reports it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from drafter_service.observability.measuring.results import cpu_name
from engine.config import EngineConfig
from engine.drafters.base import TargetInfo
from engine.drafters.registry import build_drafter
from engine.engine import build_engine
from engine.models.decoder import Decoder
from engine.models.shipped import SHIPPED_MODEL
from engine.scheduling.report import StepReport
from engine.scheduling.request import Request, SamplingParams
from engine.training.kinds import KINDS, Recipe
from engine.training.run import Run
from ssd.config import DrafterConfig

PROMPTS = 40
"""Largest number of prompts that are run."""
MAX_TOKENS = 96
"""Number of tokens of each output."""
MAX_PROMPT_TOKENS = 192
"""Largest number of prompt tokens; of longer prompts the last ones are used."""
DEPTH = 4
"""Draft depth K."""
TREE_NODES = 16
"""Largest number of draft tokens of a tree."""
TEMPERATURES = (0.8, 0.0)
"""Temperatures at which a head is measured."""
CARD_FILE = "README.md"
LICENSE_FILE = "LICENSE.txt"


@dataclass(frozen=True)
class Acceptance:
    """Means over all steps that verified a draft."""

    temperature: float
    tokens_per_step: float
    """Accepted draft tokens and the target's own token."""
    by_position: tuple[float, ...]
    """Share of the steps in which the drafts up to each position were accepted."""


def measure(
    kind: str, head: Path, target: Decoder, target_folder: Path, prompts: Sequence[np.ndarray], temperature: float
) -> Acceptance:
    """Run prompts, uint32 [N] each, with the head in the folder `head`; Medusa heads draft trees, the others paths."""
    shape: Literal["path", "tree"] = "tree" if kind == "medusa" else "path"
    config = EngineConfig(
        max_sequences=len(prompts), max_draft=TREE_NODES if shape == "tree" else DEPTH, draft_shape=shape
    )
    drafter = build_drafter(
        kind,
        DrafterConfig(draft_shape=shape, max_draft=config.max_draft, options={"depth": str(DEPTH)}),
        TargetInfo.from_model(target, config, target_folder),
        draft_models={kind: head},
    )
    requests = [
        Request(prompt, SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=seed, ignore_eos=True))
        for seed, prompt in enumerate(prompts)
    ]
    counts = np.zeros(DEPTH + 1, np.int64)  # drafts by number of accepted tokens

    def count(report: StepReport) -> None:
        np.add.at(counts, report.arrays.accepted[report.arrays.depths > 0], 1)

    engine = build_engine(target, config, drafter)
    try:
        engine.generate(requests, count)
    finally:
        engine.close()
    reached = counts[::-1].cumsum()[::-1] / max(1, counts.sum())
    return Acceptance(temperature, float(reached.sum()), tuple(float(share) for share in reached[1:]))


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
    kind = KINDS[recipe.kind]
    if has_license:
        shutil.copy(target / LICENSE_FILE, folder / LICENSE_FILE)
    (folder / CARD_FILE).write_text(
        f"""---
{_license(target)}library_name: ssd-drafter
base_model: {target.name}
---

# {recipe.kind} for {target.name}

{kind.network.format(recipe=recipe)}. It drafts for the target {target.name} (`--drafter {recipe.kind}`).
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
| first weights | {kind.first_weights} |
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
    if not KINDS[recipe.kind].copies_layer:
        return "cross-entropy with the target's distribution"
    return (
        f"cross-entropy with the target's distribution at {recipe.depth} draft positions (training-time test); chains "
        f"of several begin at the {recipe.chain_share:.0%} of rows whose first draft is most likely to be accepted"
    )
