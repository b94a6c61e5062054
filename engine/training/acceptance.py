"""Tokens per step that a head reaches on held-out prompts, measured with the engine itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from engine.config import EngineConfig
from engine.drafters.base import TargetInfo
from engine.drafters.registry import build_drafter
from engine.engine import build_engine
from engine.models.decoder import Decoder
from engine.scheduling.report import StepReport
from engine.scheduling.request import Request, SamplingParams
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


@dataclass(frozen=True)
class Acceptance:
    """Means over all steps that verified a draft."""

    temperature: float
    tokens_per_step: float
    """Accepted draft tokens and the target's own token."""
    by_position: tuple[float, ...]
    """Share of the steps in which the drafts up to each position were accepted."""


class Measurement:
    """The target with a set of held-out prompts."""

    def __init__(self, target: Decoder, folder: Path, prompts: Sequence[np.ndarray]) -> None:
        """folder: the target's. prompts: uint32 [N] each; the last tokens of long ones are used."""
        self._target = target
        self._folder = folder
        self._prompts = [prompt[-MAX_PROMPT_TOKENS:] for prompt in prompts[:PROMPTS]]

    @property
    def prompts(self) -> int:
        """Number of prompts."""
        return len(self._prompts)

    def measure(self, kind: str, head: Path, temperature: float, *, depth: int = DEPTH) -> Acceptance:
        """Run all prompts with the head in the folder `head`; Medusa heads draft trees, the others paths."""
        shape: Literal["path", "tree"] = "tree" if kind == "medusa" else "path"
        config = EngineConfig(
            max_sequences=len(self._prompts),
            max_draft=TREE_NODES if shape == "tree" else depth,
            draft_shape=shape,
        )
        drafter = build_drafter(
            kind,
            DrafterConfig(draft_shape=shape, max_draft=config.max_draft, options={"depth": str(depth)}),
            TargetInfo.from_model(self._target, config, self._folder),
            draft_models={kind: head},
        )
        engine = build_engine(self._target, config, drafter)
        counts = np.zeros(depth + 1, np.int64)
        try:
            engine.generate(
                [self._request(seed, temperature) for seed in range(len(self._prompts))],
                lambda report: _count(report, counts),
            )
        finally:
            engine.close()
        reached = counts[::-1].cumsum()[::-1] / max(1, counts.sum())
        return Acceptance(temperature, float(reached.sum()), tuple(float(share) for share in reached[1:]))

    def _request(self, seed: int, temperature: float) -> Request:
        return Request(
            self._prompts[seed],
            SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=seed, ignore_eos=True),
        )


def _count(report: StepReport, counts: np.ndarray) -> None:
    """Add a step's drafts to `counts`, int64 [depth + 1]: the number of drafts by number of accepted tokens."""
    np.add.at(counts, report.arrays.accepted[report.arrays.depths > 0], 1)
