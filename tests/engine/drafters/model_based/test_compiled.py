"""Compiled networks draft what the same heads draft in PyTorch, if their weights have been rounded before."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from engine.config import EngineConfig
from engine.drafters.model_based.autoregressive import AutoregressiveDrafter, Growth
from engine.drafters.model_based.compiled.choice import choose
from engine.drafters.model_based.compiled.drafting import CompiledDrafting
from engine.drafters.model_based.compiled.matrices import COLUMNS, blocks_of, multiply
from engine.drafters.model_based.compiled.network import compile_head
from engine.drafters.sources import DraftSource
from engine.engine import build_engine
from engine.models.packed import pack, quantize_int8
from engine.sampling.draft_sampler import choose_tokens
from engine.scheduling.pages import PagePool
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.scheduler import Scheduler
from ssd.baselines.none import NoDrafter
from tests.curves import line
from tests.engine.drafters.heads import HEADS, make_head, naive_logits

CONFIG = EngineConfig(max_sequences=4, max_step_tokens=64, max_draft=13, page_size=16, kv_memory_mib=1)
TOLERANCE = 2e-3


def rounded(module):
    """Round the weights of linear layers to int8 with a scale for each output, in place."""
    for linear in [each for each in module.modules() if isinstance(each, nn.Linear)]:
        weight = linear.weight.data
        scales = weight.abs().amax(dim=1, keepdim=True) / 127
        weight.copy_((weight / scales).round() * scales)
    return module


def requests(temperature, count=8):
    """Prompts with shared prefixes, some longer than a chunk."""
    rng = np.random.default_rng(2)
    stem = rng.integers(1, 60, 70)
    sampling = SamplingParams(24, temperature, ignore_eos=True)
    prompts = [
        np.concatenate((stem[: 16 * rng.integers(0, 5)], rng.integers(1, 60, rng.integers(1, 40))))
        for _ in range(count)
    ]
    return [Request(prompt.astype(np.uint32), replace(sampling, seed=at)) for at, prompt in enumerate(prompts)]


class Recorder:
    """Records drafts of compiled networks."""

    def __init__(self, monkeypatch):
        self.calls = []
        """Text, draft tokens, their scores, and the request's settings."""
        draft = CompiledDrafting.draft

        def recorded(drafting, sequences, *inputs):
            drafted = draft(drafting, sequences, *inputs)
            batch, scores = drafted.drafts.batch, drafted.drafts.scores
            for index, sequence in enumerate(sequences):
                own = scores[batch.offsets[index] : batch.offsets[index + 1]]
                self.calls.append((sequence.tokens.copy(), batch.tokens_of(index), own, sequence.request.sampling))
            return drafted

        monkeypatch.setattr(CompiledDrafting, "draft", recorded)
        monkeypatch.setattr(Growth, "expand", None)  # PyTorch is not used.

    def largest_difference(self, head, target, count=20):
        """Largest difference between the recorded scores and those of the same tokens according to the naive twin."""
        differences = []
        for text, path, scores, sampling in self.calls[:: max(1, len(self.calls) // count)]:
            logits = naive_logits(head, target, text, path[:-1])
            if head.draft_vocabulary is not None:
                whole = logits.new_full((len(logits), target.config.vocab_size), float("-inf"))
                logits = whole.index_copy_(1, head.draft_vocabulary, logits)
            temperatures = np.full(len(path), sampling.temperature, np.float32)
            seeds, positions = np.full(len(path), sampling.seed), len(text) + np.arange(len(path))
            tokens, expected = choose_tokens(logits, temperatures, seeds, positions, 2, 256)
            # Where two tokens are about as good, rounding decides.
            rank = np.where(tokens[:, 1] == path, 1, 0)
            assert (tokens[np.arange(len(path)), rank] == path).all()
            differences.append(np.abs(expected[np.arange(len(path)), rank] - scores).max())
            differences.append((expected[:, 0] - expected[np.arange(len(path)), rank]).max())
        return max(differences)


def run(model, config, submitted, kind, *, pages=None, depth=4):
    head = rounded(make_head(kind, model))
    drafter = AutoregressiveDrafter(
        head, depth=depth, has_trees=False, source=DraftSource.DRAFT_MODEL, network=compile_head(head)
    )
    engine = build_engine(model, config, drafter)
    if pages is not None:
        engine.scheduler = Scheduler(config, PagePool(pages, config.page_size))
    completions = engine.generate(submitted)
    engine.scheduler.check_integrity()
    return head, engine, completions


def tokens_of(completions):
    return [each.tokens.tolist() for each in completions]


@pytest.mark.parametrize("temperature", [0.0, 1])
@pytest.mark.parametrize("kind", HEADS)
def test_drafts_equal_those_of_the_head(model, monkeypatch, kind, temperature):
    recorder = Recorder(monkeypatch)
    model = rounded(deepcopy(model))
    submitted = requests(temperature)
    plain = build_engine(model, CONFIG, NoDrafter()).generate(submitted)
    head, _, completions = run(model, CONFIG, submitted, kind)
    assert tokens_of(completions) == tokens_of(plain)
    assert sum(each.drafted for each in completions) > 100
    assert any(each.cached_tokens for each in completions)
    assert max(len(path) for _, path, _, _ in recorder.calls) == 4
    assert recorder.largest_difference(head, model) < TOLERANCE


@pytest.mark.parametrize(("kind", "is_compiled", "pays"), [
    ("self", True, True), ("self", False, False), ("draft-model", False, True),
])  # fmt: skip
def test_a_copy_of_the_target_that_is_not_compiled_is_never_called(model, monkeypatch, kind, is_compiled, pays):
    monkeypatch.setattr("engine.executor.build.measured_curve", lambda *_, **__: line(1e-6))
    model, said = rounded(deepcopy(model)), []
    head = rounded(make_head(kind, model))
    network = compile_head(head) if is_compiled else None
    drafter = AutoregressiveDrafter(head, depth=4, has_trees=False, source=DraftSource.DRAFT_MODEL, network=network)
    engine = build_engine(model, CONFIG, drafter, has_budget=True, warn=said.append)
    assert (sum(each.drafted for each in engine.generate(requests(0.0))) > 0) == pays
    assert len(said) == (not pays)
    assert pays or "nothing is drafted" in said[0]
    assert pays or "at most 64 M weights" in said[0]


@pytest.mark.parametrize("kind", HEADS)
def test_slots_survive_preemption(model, monkeypatch, kind):
    recorder = Recorder(monkeypatch)
    model = rounded(deepcopy(model))
    submitted = requests(0.8)
    config = replace(CONFIG, watermark=0.0)
    head, engine, _ = run(model, config, submitted, kind, pages=9)
    assert engine.scheduler.preemptions > 0
    assert recorder.largest_difference(head, model) < TOLERANCE


@given(st.integers(1, 9), st.integers(1, 20), st.sampled_from([1, 5, 511, 512, 513, 1030]), st.booleans())
def test_products_equal_those_of_numpy(count, inputs, outputs, has_bias):
    rng = np.random.default_rng(count + 10 * inputs)
    values = rng.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    scales, bias = rng.random(outputs, np.float32), rng.standard_normal(outputs, np.float32)
    rows, found = rng.standard_normal((count, inputs), np.float32), np.empty((count, outputs), np.float32)
    matrix = np.array([0, 0, outputs if has_bias else -1, inputs, outputs])
    assert len(matrix) == COLUMNS
    multiply(blocks_of(values), np.concatenate((scales, bias)), matrix, rows, found)
    expected = rows @ (values * scales[:, None]).T.astype(np.float32) + has_bias * bias
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


@given(st.integers(0, 1000), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([3, 256, 257, 900]), st.booleans())
def test_choices_equal_those_of_other_drafters(seed, temperature, vocab_size, has_ties):
    """The reference is the kernel that drafters without a compiled network use."""
    rng = np.random.default_rng(seed)
    logits = 4 * rng.standard_normal((1, vocab_size), np.float32)
    if has_ties:
        logits = logits.round()
    found = choose(logits[0].copy(), np.empty(0, np.int64), np.float32(temperature), seed, 7)
    expected = choose_tokens(
        torch.from_numpy(logits), np.full(1, temperature, np.float32), np.full(1, seed), np.full(1, 7), 1, 256
    )
    assert found[0] == expected[0][0, 0]
    assert abs(found[1] - expected[1][0, 0]) < 1e-4


def test_logits_that_are_not_numbers_are_not_chosen():
    logits = np.full(300, np.nan, np.float32)
    for temperature in (0.0, 1.0):
        assert choose(logits.copy(), np.empty(0, np.int64), np.float32(temperature), 0, 7)[0] == -1


@pytest.mark.parametrize("convert", [pack, quantize_int8])
def test_weights_in_other_layouts_are_read(model, convert):
    """The target's own projection is packed or rounded when heads are attached to it."""
    plain = rounded(deepcopy(model))
    expected = compile_head(make_head("self", plain))
    found = compile_head(make_head("self", convert(deepcopy(plain))))
    assert (found.weights == expected.weights).all()
    np.testing.assert_allclose(found.floats, expected.floats, rtol=1e-6)
