"""Acceptance of a trained head on held-out prompts, measured with the engine itself, and the card that reports it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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


def write_card(folder: Path, run: Run, target: Path, facts: Mapping[str, str], results: Sequence[Acceptance]) -> None:
    """Write the card into `folder`, and the target's license file if it has one.

    facts: further properties of the run, by name.
    """
    recipe, license_note = run.recipe, ""
    license_fields = "license: other\nlicense_name: psf-2.0\n" if target == SHIPPED_MODEL else ""
    if (target / LICENSE_FILE).exists():
        shutil.copy(target / LICENSE_FILE, folder / LICENSE_FILE)
        license_note = f" The target's license applies (`{LICENSE_FILE}`)."
    acceptance = "\n".join(
        f"| temperature {result.temperature:g} | {result.tokens_per_step:.2f} "
        f"| {', '.join(f'{share:.2f}' for share in result.by_position)} |"
        for result in results
    )
    own = asdict(recipe) | {"hardware": cpu_name(), "threads": torch.get_num_threads()}
    rows = "\n".join(f"| {name} | {value} |" for name, value in {**facts, **own}.items())
    (folder / CARD_FILE).write_text(
        f"""---
{license_fields}library_name: ssd-drafter
base_model: {target.name}
---

# {recipe.kind} for {target.name}

It drafts for the target {target.name} (`--drafter {recipe.kind}`).{license_note}

| held-out acceptance | tokens per step | accepted at position 1, 2, .. |
|---|---|---|
{acceptance}

Outputs of {MAX_TOKENS} tokens, one measurement; greedy outputs include loops. Labels are the target's distributions.

| | |
|---|---|
{rows}

Made by `ssd-engine train {recipe.kind}` in {run.seconds / 60:.0f} minutes.
""",
        encoding="utf-8",
    )
