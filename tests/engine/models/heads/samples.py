"""Heads of every kind with random weights, attached to a small target."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.models.heads.eagle import EagleHead
from engine.models.heads.eagle3 import Eagle3Head, Eagle3Style
from engine.models.heads.medusa import MedusaHeads
from engine.models.heads.mtp import MtpHead, MtpStyle


def randomize(module, seed=0):
    """Fill matrices so that they keep the size of their inputs, and vectors with noise, around 1 for norms."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            spread = 0.3 if parameter.ndim == 1 else parameter.shape[1] ** -0.5
            parameter.copy_(("norm" in name) + spread * torch.randn(parameter.shape, generator=generator))
    return module.eval().requires_grad_(False)


def draft_ids(vocab_size, count, seed=0):
    """Return `count` different tokens in ascending order, int64."""
    return torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[:count].sort().values


def mtp(target, *, seed=0, zeroes_first=True, **shape):
    head = MtpHead(replace(target.config, num_layers=1, **shape), target.config.num_layers, MtpStyle(zeroes_first))
    head.attach(target)
    return randomize(head, seed)


def eagle(target, *, seed=0, has_bias=True, has_embedding=False, **shape):
    config = replace(target.config, num_layers=1, **shape)
    head = EagleHead(config, target.config.num_layers, has_bias=has_bias)
    if has_embedding:
        head.embedding = torch.nn.Embedding(config.vocab_size, config.hidden_size)
    head.attach(target)
    return randomize(head, seed)


def eagle3(target, *, seed=0, style=None, hidden_layers=(0, 1, 2), kept=200, has_embedding=False, **shape):
    config = replace(target.config, num_layers=1, **shape)
    head = Eagle3Head(
        config,
        hidden_layers,
        style or Eagle3Style(),
        target_hidden_size=target.config.hidden_size,
        draft_vocab_size=config.vocab_size if kept is None else kept,
    )
    if kept is not None:
        head.draft_vocabulary = draft_ids(config.vocab_size, kept)
    if has_embedding or config.hidden_size != target.config.hidden_size:
        head.embedding = torch.nn.Embedding(config.vocab_size, config.hidden_size)
    head.attach(target)
    return randomize(head, seed)


def medusa(target, *, seed=0, count=3, blocks=1):
    heads = MedusaHeads(target.config, count, blocks)
    heads.attach(target)
    return randomize(heads, seed)
