"""Settings that determine the result of a training run, together with the target and the text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Settings of a run. The learning rates rise linearly over the warm-up and fall linearly to zero at the end."""

    kind: str
    total_tokens: int
    """Tokens of the run, each counted once however many draft positions are trained on it."""
    window: int = 512
    """Tokens in a row of a batch."""
    batch_windows: int = 2
    depth: int = 4
    """Number of draft positions that are unrolled, or of Medusa heads."""
    chain_share: float = 0.4
    """Share of the rows of a window from which chains of more than one draft position begin. The others would hardly
    ever be reached: their first draft token is the least likely to be accepted."""
    matrix_lr: float = 0.008
    """Learning rate of Muon, for matrices (Jordan et al., 2024), relative to their singular values at the start."""
    other_lr: float = 2e-3
    """Learning rate of AdamW, for norms, embeddings and output projections."""
    warmup_steps: int = 10
    draft_vocabulary: int = 3072
    """Most frequent tokens that an EAGLE-3 head can draft, if the target has more."""
    num_layers: int = 2
    """Layers of a draft model."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for a run without a step."""
        if self.steps == 0:
            raise ValueError(
                f"a run needs at least one batch of {self.batch_tokens} tokens, not {self.total_tokens}; raise --tokens"
            )

    @property
    def batch_tokens(self) -> int:
        """Tokens of one step."""
        return self.window * self.batch_windows

    @property
    def steps(self) -> int:
        """Number of steps of the whole run."""
        return self.total_tokens // self.batch_tokens

    def rate(self, step: int) -> float:
        """Return the learning rate of a step as a share of its peak."""
        return min(1.0, (step + 1) / self.warmup_steps, (self.steps - step) / (0.9 * self.steps))


RECIPES: Mapping[str, Recipe] = {
    recipe.kind: recipe
    for recipe in (
        Recipe("draft-model", 2_000_000, matrix_lr=0.01),
        Recipe("mtp", 2_000_000, matrix_lr=0.005, other_lr=1e-3),
        # Without norms, errors grow along chains: at 0.008 an EAGLE head became worse.
        Recipe("eagle", 2_000_000, matrix_lr=0.002, other_lr=5e-4),
        Recipe("eagle3", 2_000_000, matrix_lr=0.004, other_lr=1e-3),
        Recipe("medusa", 1_000_000, matrix_lr=0.01, depth=2),
    )
}
"""Recipes by kind. The heads that ship with the project were trained on fewer tokens; their cards say on how many."""
