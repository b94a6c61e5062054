"""Faults of heads that do not change outputs lower the acceptance of the heads that ship with the package."""

import json

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.drafters.base import TargetInfo
from engine.drafters.registry import build_drafter
from engine.engine import build_engine
from engine.models.heads import eagle3
from engine.models.loader import load_model
from engine.models.shipped import PROMPTS_FILE, SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from engine.scheduling.request import Request, SamplingParams
from ssd.config import DrafterConfig
from tests.engine.drafters.test_networks import of_the_same_position

PROMPTS = 8
CONFIG = EngineConfig(max_draft=3, max_sequences=PROMPTS)


@pytest.fixture(scope="module")
def target():
    return load_model(SHIPPED_MODEL)


@pytest.fixture(scope="module")
def requests():
    lines = (SHIPPED_MODEL / PROMPTS_FILE).read_text(encoding="utf-8").splitlines()[:PROMPTS]
    tokenizer = Tokenizer(SHIPPED_MODEL)
    prompts = [np.array(tokenizer.encode(json.loads(line)["prompt"])[-100:], np.uint32) for line in lines]
    sampling = {"max_tokens": 24, "temperature": 0.8, "ignore_eos": True}
    return [Request(prompt, SamplingParams(seed=seed, **sampling)) for seed, prompt in enumerate(prompts)]


def run(target, kind, requests):
    """Return outputs, and the number of accepted tokens per step."""
    drafter = build_drafter(kind, DrafterConfig(max_draft=3), TargetInfo.from_model(target, CONFIG, SHIPPED_MODEL))
    completions = build_engine(target, CONFIG, drafter).generate(requests)
    rate = sum(each.accepted for each in completions) / sum(each.steps for each in completions)
    return [each.tokens.tolist() for each in completions], rate


@pytest.fixture(scope="module")
def without_faults(target, requests):
    """Outputs and accepted tokens per step by kind."""
    return {kind: run(target, kind, requests) for kind in ("mtp", "eagle", "eagle3")}


def next_token(monkeypatch):
    """Planted fault: each row of the draft vocabulary belongs to the token after its own."""
    read = eagle3.read_draft_ids
    monkeypatch.setattr(
        eagle3,
        "read_draft_ids",
        lambda source, target, size: (read(source, target, size) + 1) % target.vocab_size,
    )


def offsets_as_tokens(monkeypatch):
    """Planted fault: `d2t` is read as tokens instead of offsets."""
    read = eagle3.read_draft_ids

    def without_rows(source, target, size):
        tokens = read(source, target, size)
        return tokens - torch.arange(len(tokens))

    monkeypatch.setattr(eagle3, "read_draft_ids", without_rows)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("mtp", of_the_same_position),
        ("eagle", of_the_same_position),
        ("eagle3", of_the_same_position),
        ("eagle3", next_token),
        ("eagle3", offsets_as_tokens),
    ],
)
def test_planted_faults_lower_the_acceptance(target, requests, without_faults, monkeypatch, kind, fault):
    expected, right = without_faults[kind]
    fault(monkeypatch)
    outputs, wrong = run(target, kind, requests)
    assert outputs == expected
    assert right > 0.8
    assert wrong < 0.7 * right
