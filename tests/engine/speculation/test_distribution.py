"""Sampled outputs of the whole engine have the target's distribution, for each way of drafting and verifying.

A tiny model, the same prompt with many seeds, and a chi-square test of the first tokens against the exact
probabilities. Planted faults must be caught by the same test.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from engine.config import EngineConfig
from engine.drafters.base import TargetInfo
from engine.engine import build_engine
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.sampling.noise import uniforms
from engine.scheduling.request import Request, SamplingParams
from engine.speculation import rejection, verify
from engine.speculation import speculation as speculation_module
from engine.speculation.selection import DraftSelection
from ssd.budget.token_budget import StepPrice
from ssd.config import DrafterConfig
from tests.curves import line
from tests.engine.drafters.toy import ToyDrafter, attend_densely
from tests.engine.speculation.test_rejection import FAULTS as REJECTION_FAULTS
from tests.engine.speculation.test_rejection import planted

VOCAB = 32
COUNT = 1500
LENGTH = 3
"""Number of tested tokens of each output; outputs are longer, so that drafts have room."""
LIKELY = 4
"""Number of allowed token ids; a bias forbids all others, so that there are few different outputs."""
BIAS = dict.fromkeys(range(LIKELY, VOCAB), -100.0)
PROMPT = np.array([3, 1, 4], np.uint32)
SHAPE = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
    tie_embeddings=False,
    eos_token_ids=(),
)
CONFIG = EngineConfig(
    max_sequences=250, max_step_tokens=4000, max_draft=6, draft_shape="tree", verification="rejection", kv_memory_mib=8
)


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(1)
    model = Decoder(SHAPE).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.ndim > 1 else 1.0))
        model.norm.weight.fill_(1.0)
    return model


@torch.inference_mode()
def next_probabilities(model, text):
    tokens = torch.tensor(text)
    logits = model.logits(model(tokens, torch.arange(len(text)), attend_densely))[-1].float()
    return dict(enumerate(torch.softmax(logits[:LIKELY], 0).tolist()))


@pytest.fixture(scope="module")
def expected(target):
    """Probabilities of all outputs of `LENGTH` tokens."""
    outputs = {(): 1.0}
    for _ in range(LENGTH):
        outputs = {
            (*output, token): probability * own
            for output, probability in outputs.items()
            for token, own in next_probabilities(target, [*PROMPT.tolist(), *output]).items()
        }
    return outputs


class ByOwnProbability:
    """A selection that drops every token with a low `accept_prob`."""

    def admits(self, plan):
        return True

    def price(self, plan):
        return StepPrice(100.0, 0.03)

    def select(self, plan, drafts, usable):
        lengths = []
        for start, end in zip(drafts.offsets[:-1].tolist(), drafts.offsets[1:].tolist(), strict=True):
            unlikely = drafts.accept_prob[start:end] < 0.2
            lengths.append(int(unlikely.argmax()) if unlikely.any() else end - start)
        return np.array(lengths)

    def record(self, *_):
        pass


class BoastfulDrafter(ToyDrafter):
    """Sets accept_prob to a sampled token's own probability, which verification must not depend on."""

    def drafts(self, candidates, q, has_q):
        drafts = super().drafts(candidates, q, has_q)
        own = drafts.q[drafts.q_rows.clip(0), drafts.batch.tokens.astype(np.int64)].numpy()
        return replace(drafts, batch=replace(drafts.batch, accept_prob=own))


def outputs_of(target, config, drafter, selection=None):
    engine = build_engine(target, config, drafter)
    engine._speculation._selection = engine._selection = selection
    sampling = SamplingParams(max_tokens=LENGTH + 5, temperature=1.0, logit_bias=BIAS, ignore_eos=True)
    completions = engine.generate(Request(PROMPT, replace(sampling, seed=seed)) for seed in range(COUNT))
    assert sum(completion.accepted for completion in completions) > COUNT / 50
    return [tuple(completion.tokens[:LENGTH].tolist()) for completion in completions]


def fits(outputs, expected):
    """Return whether outputs fit the distribution: a chi-square test at one in a million, rare outputs in one cell."""
    order = sorted(expected, key=expected.__getitem__)
    mass = np.cumsum([expected[output] for output in order])
    rare = set(order[: int(np.searchsorted(mass, 10 / COUNT)) + 1])
    cells = {output: index for index, output in enumerate(output for output in order if output not in rare)}
    if any(output not in expected for output in outputs):
        return False
    observed = np.bincount([cells.get(output, len(cells)) for output in outputs], minlength=len(cells) + 1)
    probabilities = [expected[output] for output in cells]
    theirs = np.array([*probabilities, 1 - sum(probabilities)]) * COUNT
    return bool(chisquare(observed, theirs).pvalue > 1e-6)


def toy(target, kind=ToyDrafter, **how):
    return kind(DrafterConfig(), TargetInfo.from_model(target, CONFIG), **how)


WAYS = {
    "path of sampled tokens": {"width": 1},
    "tree of sampled tokens": {"width": 3, "depth": 2},
    "path of ranked tokens": {"width": 1, "ranked": (0,)},
    "tree of ranked tokens": {"width": 3, "depth": 2, "ranked": (0, 1, 2)},
    "tree of both": {"width": 3, "depth": 2, "ranked": (1,)},
}


@pytest.mark.parametrize(
    ("way", "verification"),
    [*((way, "rejection") for way in WAYS), ("path of sampled tokens", "exact"), ("tree of sampled tokens", "exact")],
)
def test_outputs_have_the_targets_distribution(target, expected, way, verification):
    config = replace(CONFIG, verification=verification)
    assert fits(outputs_of(target, config, toy(target, **WAYS[way])), expected)


def test_selection_does_not_depend_on_a_sampled_tokens_probability(target, expected):
    drafter = toy(target, BoastfulDrafter, width=1)
    assert fits(outputs_of(target, CONFIG, drafter, ByOwnProbability()), expected)


def test_outputs_have_the_targets_distribution_with_the_token_budget(target, expected, monkeypatch):
    monkeypatch.setattr(speculation_module, "perf_counter", lambda: 0.0)  # No backoff from measured times.
    drafter = toy(target, width=3, depth=2)
    assert fits(outputs_of(target, CONFIG, drafter, DraftSelection(line(0.002))), expected)


def budget_sees_tokens(monkeypatch):
    monkeypatch.setattr(speculation_module, "uses_rejection", lambda plan: np.zeros(plan.producers, np.bool_))


def residual_is_p(monkeypatch):
    monkeypatch.setattr(rejection, "_residuals", lambda walks, residual, p, q: p[[walk.p_row for walk in walks]])


def one_number_for_all_trials(monkeypatch):
    """All decisions use the same random number."""
    monkeypatch.setattr(
        rejection, "uniforms", lambda seeds, positions, ranks: uniforms(seeds * 0, positions * 0, ranks * 0)
    )


def q_of_another_row(monkeypatch):
    original = ToyDrafter.drafts

    def shifted(*arguments):
        drafts = original(*arguments)
        return replace(drafts, q=drafts.q.roll(1, dims=0).roll(1, dims=1))

    monkeypatch.setattr(ToyDrafter, "drafts", shifted)


@pytest.mark.parametrize("fault", [budget_sees_tokens, residual_is_p, one_number_for_all_trials, q_of_another_row])
def test_faults_planted_in_paths_are_caught(target, expected, monkeypatch, fault):
    fault(monkeypatch)
    selection = ByOwnProbability() if fault is budget_sees_tokens else None
    drafter = toy(target, BoastfulDrafter, width=1)
    assert not fits(outputs_of(target, CONFIG, drafter, selection), expected)


@pytest.mark.parametrize("fault", ["residual of the first rejection", "q stays for the next candidate"])
def test_faults_planted_among_siblings_are_caught(target, expected, monkeypatch, fault):
    faulty = planted(*REJECTION_FAULTS[fault])
    monkeypatch.setattr(verify, "verify_by_rejection", faulty.verify_by_rejection)
    assert not fits(outputs_of(target, CONFIG, toy(target, width=3, depth=2)), expected)
