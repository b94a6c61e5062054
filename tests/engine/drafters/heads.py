"""Heads with random weights, and the obvious way to run them: the whole text at once, without pages and batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from engine.drafters.draft_model import ModelHead
from engine.models.decoder import Decoder
from engine.models.layers import PLAIN
from tests.engine.forward import attend_densely
from tests.engine.models.heads import samples


def random_weights(module, scale=0.2):
    """Fill weights with noise; norms stay close to 1."""
    with torch.no_grad():
        for parameter in module.parameters():
            noise = scale * torch.randn_like(parameter)
            parameter.copy_(1 + noise if parameter.ndim == 1 else noise)
    return module.eval().requires_grad_(False)


def mtp(target):
    return samples.mtp(target, experts=None)


def eagle(target):
    return samples.eagle(target, experts=None, latent=None)


def eagle3(target):
    head = samples.eagle3(target, num_heads=2, num_kv_heads=1, head_dim=32, experts=None, latent=None)
    head.draft_vocabulary = torch.arange(200) + torch.arange(200) // 2
    return head


def draft_model(target):
    shape = replace(target.config, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, num_layers=2)
    return ModelHead(random_weights(Decoder(shape)))


def self_copy(target):
    """The target itself as its drafter."""
    return ModelHead(target, shares_target_cache=True)


HEADS = {"mtp": mtp, "eagle": eagle, "eagle3": eagle3, "draft-model": draft_model, "self": self_copy}


def make_head(kind, target, seed=5):
    torch.manual_seed(seed)
    head = samples.medusa(target) if kind == "medusa" else HEADS[kind](target)
    if not isinstance(head, ModelHead):
        random_weights(head)
    head.attach(target)
    return head


def naive_logits(head, target, text, path):
    """Logits after the text and after each token of the path, [1 + path, draft vocabulary].

    The target's states of the text are computed from the text alone, and each draft position runs all positions again.
    """
    whole = torch.from_numpy(np.concatenate((text, path)).astype(np.int64))
    if isinstance(head, ModelHead):
        hidden = head.model(whole, torch.arange(len(whole)), attend_densely)
        return head.logits(hidden)[len(text) - 1 :].float()
    tokens = whole[: len(text)]
    _, layers = target.hidden_states(tokens, torch.arange(len(tokens)), attend_densely, PLAIN, head.hidden_layers)
    states = head.target_states(layers)[:-1]
    found = []
    for end in range(len(text), len(whole) + 1):
        positions = torch.arange(1, end)
        output = head(whole[1:end], states, positions, attend_densely)
        found.append(head.logits(output.hidden[-1:]).float())
        states = torch.cat((states, output.state[-1:]))
    return torch.cat(found)
