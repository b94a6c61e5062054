"""A target of 32 tokens, and a statistical test whether outputs were sampled from its distribution."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import settings
from scipy.stats import chi2

from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.scheduling.request import Request, SamplingParams
from tests.engine.forward import attend_densely

VOCAB = 32
PROMPT = np.array([3, 1, 4], np.uint32)
TEMPERATURE = 0.8
LENGTH = 40
"""Number of tokens of each output."""
LEAST_EXPECTED = 10
"""Least expected count of a cell in a chi-square test; rarer cells are joined."""
SIGNIFICANCE = 1e-6
"""Least p-value of outputs that fit. The seeds are fixed, so a test that passes once fails only if rounding differs."""
EFFORT = 10 if settings.get_current_profile_name() == "fuzz" else 1
"""Factor of the number of tokens that are sampled."""
SHAPE = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_positions=64,
    tie_embeddings=False,
    eos_token_ids=(),
)


@torch.inference_mode()
def new_target():
    """Return a target whose distributions depend mostly on the last token, so that faults have an effect on `fits`.

    Their mean entropy is 2 nats.
    """
    torch.manual_seed(1)
    target = Decoder(SHAPE).eval().requires_grad_(False)
    for parameter in target.parameters():
        parameter.copy_(0.2 * torch.randn_like(parameter) if parameter.ndim > 1 else torch.ones_like(parameter))
    target.embedding.weight *= 5
    target.lm_head.weight *= 1.5
    return target


def sampled_requests(tokens, verification, first_seed=0):
    """Return requests for outputs of `tokens` tokens in total, with the same prompt and different seeds."""
    sampling = {"max_tokens": LENGTH, "temperature": TEMPERATURE, "ignore_eos": True, "verification": verification}
    seeds = range(first_seed, first_seed + EFFORT * tokens // LENGTH)
    return [Request(PROMPT, SamplingParams(seed=seed, **sampling)) for seed in seeds]


@torch.inference_mode()
def distributions(target, output):
    """Return the target's distribution of each token of an output given the tokens before it, float64 [n, VOCAB]."""
    text = torch.from_numpy(np.concatenate((PROMPT, output[:-1])).astype(np.int64))
    hidden = target(text, torch.arange(len(text)), attend_densely)[len(PROMPT) - 1 :]
    return torch.softmax(target.logits(hidden).double() / TEMPERATURE, dim=1).numpy()


def fits(target, outputs):
    """Return whether outputs, uint32 [n] each, were sampled from the target's distributions.

    Two chi-square tests: of the tokens after each token, and of the ranks of tokens in their distributions, which shows
    faults that favor likely or unlikely tokens after any text. An expected count is the sum of the probabilities of a
    token given all tokens before it. Counts vary less than with equal probabilities, so p-values are not too small.
    """
    p = np.concatenate([distributions(target, output) for output in outputs])
    before = np.concatenate([np.append(PROMPT[-1], output[:-1]) for output in outputs])
    tokens = np.concatenate(outputs)
    observed, expected = np.zeros((2, VOCAB, VOCAB))
    np.add.at(observed, (before, tokens), 1)
    np.add.at(expected, before, p)
    ranks = (p > p[np.arange(len(p)), tokens, None]).sum(axis=1)
    by_rank = np.sort(p, axis=1)[:, ::-1].sum(axis=0)
    p_values = p_value(observed, expected), p_value(np.bincount(ranks, minlength=VOCAB), by_rank)
    return bool(min(p_values) > SIGNIFICANCE)


def p_value(observed, expected):
    """Return the p-value of Pearson's chi-square test, for counts of any shape."""
    is_rare = expected < LEAST_EXPECTED
    observed, expected = (np.append(each[~is_rare], each[is_rare].sum()) for each in (observed, expected))
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    return chi2.sf(((observed - expected) ** 2 / expected).sum(), len(observed) - 1)
