"""The kinds of heads that can be trained: the layers of the target that each reads, and a new head with its loss."""

from __future__ import annotations

import numpy as np
from torch import nn

from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.training.networks import (
    frequent_tokens,
    new_draft_model,
    new_eagle,
    new_eagle3,
    new_medusa,
    new_mtp,
)
from engine.training.objectives import ChainObjective, DraftModelObjective, MedusaObjective, Objective
from engine.training.recipe import Recipe
from engine.training.windows import read_windows

SAMPLE_TOKENS = 20_480
"""Tokens from which the first weights are estimated."""


def needed_layers(kind: str, config: ModelConfig) -> tuple[int, ...]:
    """Return the layers of the target whose states a new head needs, ascending.

    The states after the last layer give the labels. Those before it are the input of that layer, which the first
    weights of heads with a decoder layer estimate.
    """
    last = config.num_layers
    layers = {last}
    if kind in ("mtp", "eagle", "eagle3"):
        layers.add(last - 1)
    if kind == "eagle3":
        layers |= eagle3_layers(last)
    return tuple(sorted(layers))


def eagle3_layers(count: int) -> set[int]:
    """Return the layers that an EAGLE-3 head reads, for a target of `count` layers.

    They are a lower one, a middle one and the last but one, because vLLM provides no states after the last one.
    """
    return {max(0, count // 3), max(0, 2 * count // 3), count - 1}


def new_objective(recipe: Recipe, target: Decoder, text: np.ndarray) -> Objective:
    """Return a new head for the target with its loss. text: windows, uint32 [W, T].

    Raises ValueError for a target that is too small for the head.
    """
    kind = recipe.kind
    sample = text[: -(-SAMPLE_TOKENS // recipe.window)]
    windows = read_windows(target, sample, needed_layers(kind, target.config))
    if kind == "draft-model":
        model = new_draft_model(target, recipe.num_layers)
        model.embedding.weight.requires_grad_(False)
        model.lm_head.weight.requires_grad_(False)
        return DraftModelObjective(model, target, recipe.depth)
    if kind == "medusa":
        return MedusaObjective(new_medusa(target, recipe.depth, windows), target)
    if kind == "mtp":
        return ChainObjective(new_mtp(target, windows), target, recipe.depth, recipe.chain_share)
    if kind == "eagle":
        return ChainObjective(new_eagle(target, windows), target, recipe.depth, recipe.chain_share)
    tokens = frequent_tokens(text, target.config.vocab_size, recipe.draft_vocabulary)
    layers = tuple(sorted(eagle3_layers(target.config.num_layers)))
    head = new_eagle3(target, layers, tokens, windows)
    assert isinstance(head.lm_head, nn.Linear)
    head.lm_head.weight.requires_grad_(False)
    return ChainObjective(head, target, recipe.depth, recipe.chain_share)
