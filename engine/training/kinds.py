"""The kinds of heads that can be trained: for each its recipe, and a new head with its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import nn

from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.heads.head import DraftHead
from engine.training.networks import (
    frequent_tokens,
    new_draft_model,
    new_eagle,
    new_eagle3,
    new_medusa,
    new_mtp,
)
from engine.training.objectives import (
    ChainObjective,
    DraftModelObjective,
    MedusaObjective,
    Objective,
    Windows,
    read_windows,
)

SAMPLE_TOKENS = 20_480
"""Tokens from which the first weights are estimated."""


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


@dataclass(frozen=True)
class HeadKind:
    """A kind of head."""

    recipe: Recipe
    """The heads that ship with the project were trained on fewer tokens; their cards say on how many."""
    new: Callable[[Recipe, Decoder, np.ndarray, Windows], Objective]
    """Returns a new head with its loss for a recipe, the target, the text, and the windows of a sample of it. Raises
    ValueError for a target that is too small for the head."""
    copies_layer: bool = False
    """Whether heads begin with the target's last layer, whose input they estimate."""


def eagle3_layers(count: int) -> set[int]:
    """Return the layers that an EAGLE-3 head reads, for a target of `count` layers.

    They are a lower one, a middle one and the last but one, because vLLM provides no states after the last one.
    """
    return {max(0, count // 3), max(0, 2 * count // 3), count - 1}


def _draft_model(recipe: Recipe, target: Decoder, _text: np.ndarray, _sample: Windows) -> Objective:
    model = new_draft_model(target, recipe.num_layers)
    model.embedding.weight.requires_grad_(False)
    model.lm_head.weight.requires_grad_(False)
    return DraftModelObjective(model, target, recipe.depth)


def _eagle3(recipe: Recipe, target: Decoder, text: np.ndarray, sample: Windows) -> Objective:
    tokens = frequent_tokens(text, target.config.vocab_size, recipe.draft_vocabulary)
    head = new_eagle3(target, tuple(sorted(eagle3_layers(target.config.num_layers))), tokens, sample)
    assert isinstance(head.lm_head, nn.Linear)
    head.lm_head.weight.requires_grad_(False)
    return _chains(head, recipe, target)


def _chains(head: DraftHead, recipe: Recipe, target: Decoder) -> Objective:
    return ChainObjective(head, target, recipe.depth, recipe.chain_share)


KINDS = {
    kind.recipe.kind: kind
    for kind in (
        HeadKind(Recipe("draft-model", 2_000_000, matrix_lr=0.01), _draft_model),
        HeadKind(
            Recipe("mtp", 2_000_000, matrix_lr=0.005, other_lr=1e-3),
            lambda recipe, target, _text, sample: _chains(new_mtp(target, sample), recipe, target),
            copies_layer=True,
        ),
        HeadKind(
            # Without norms, errors grow along chains: at 0.008 an EAGLE head became worse.
            Recipe("eagle", 2_000_000, matrix_lr=0.002, other_lr=5e-4),
            lambda recipe, target, _text, sample: _chains(new_eagle(target, sample), recipe, target),
            copies_layer=True,
        ),
        HeadKind(Recipe("eagle3", 2_000_000, matrix_lr=0.004, other_lr=1e-3), _eagle3, copies_layer=True),
        HeadKind(
            Recipe("medusa", 1_000_000, matrix_lr=0.01, depth=2),
            lambda recipe, target, _text, sample: MedusaObjective(new_medusa(target, recipe.depth, sample), target),
        ),
    )
}
"""Kinds by name."""


def needed_layers(kind: str, config: ModelConfig) -> tuple[int, ...]:
    """Return the layers of the target whose states a new head needs, ascending.

    The states after the last layer give the labels. Those before it are the input of that layer, which the first
    weights of heads with a decoder layer estimate.
    """
    last = config.num_layers
    layers = {last, last - 1} if KINDS[kind].copies_layer else {last}
    return tuple(sorted(layers | eagle3_layers(last) if kind == "eagle3" else layers))


def new_objective(recipe: Recipe, target: Decoder, text: np.ndarray) -> Objective:
    """Return a new head for the target with its loss, like `HeadKind.new`. text: windows, uint32 [W, T]."""
    sample = text[: -(-SAMPLE_TOKENS // recipe.window)]
    windows = read_windows(target, sample, needed_layers(recipe.kind, target.config))
    return KINDS[recipe.kind].new(recipe, target, text, windows)
