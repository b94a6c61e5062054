"""Compiled networks draft what the same heads draft in PyTorch, if their weights have been rounded before."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from engine.drafters.autoregressive import Growth
from engine.drafters.compiled.drafting import CompiledDrafting
from engine.drafters.compiled.matrices import COLUMNS, blocks_of, multiply
from engine.drafters.compiled.network import compile_head
from engine.engine import build_engine
from engine.models.packed import pack, quantize_int8
from engine.sampling.choice import NONE, choose_rows
from ssd.baselines.none import NoDrafter
from tests.curves import line
from tests.engine.drafters.heads import HEADS, make_head, naive_logits
from tests.engine.drafters.networks import CONFIG, TOLERANCE, new_drafter, requests, run, tokens_of


def rounded(module):
    """Round the weights of linear layers to int8 with a scale for each output, in place."""
    for linear in [each for each in module.modules() if isinstance(each, nn.Linear)]:
        weight = linear.weight.data
        scales = weight.abs().amax(dim=1, keepdim=True) / 127
        weight.copy_((weight / scales).round() * scales)
    return module


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
            tokens, expected = np.full((len(path), 2), NONE), np.zeros((len(path), 2), np.float32)
            choose_rows(logits.numpy().copy(), temperatures, seeds, positions, tokens, expected)
            # Where two tokens are about as good, rounding decides.
            rank = np.where(tokens[:, 1] == path, 1, 0)
            assert (tokens[np.arange(len(path)), rank] == path).all()
            differences.append(np.abs(expected[np.arange(len(path)), rank] - scores).max())
            differences.append((expected[:, 0] - expected[np.arange(len(path)), rank]).max())
        return max(differences)


def run_compiled(model, config, submitted, kind, pages=None):
    head = rounded(make_head(kind, model))
    drafter = new_drafter(kind, model, config, head=head, network=compile_head(head))
    return head, *run(model, config, submitted, drafter, pages)


@pytest.mark.parametrize("temperature", [0.0, 1])
@pytest.mark.parametrize("kind", HEADS)
def test_drafts_equal_those_of_the_head(model, monkeypatch, kind, temperature):
    recorder = Recorder(monkeypatch)
    model = rounded(deepcopy(model))
    submitted = requests(temperature, is_plain=True)
    plain = build_engine(model, CONFIG, NoDrafter()).generate(submitted)
    head, _, completions = run_compiled(model, CONFIG, submitted, kind)
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
    drafter = new_drafter(kind, model, CONFIG, head=head, network=network)
    engine = build_engine(model, CONFIG, drafter, has_budget=True, warn=said.append)
    assert (sum(each.drafted for each in engine.generate(requests(0.0, is_plain=True))) > 0) == pays
    assert len(said) == (not pays)
    assert pays or "nothing is drafted" in said[0]
    assert pays or "at most 64 M weights" in said[0]


@pytest.mark.parametrize("kind", HEADS)
def test_slots_survive_preemption(model, monkeypatch, kind):
    recorder = Recorder(monkeypatch)
    model = rounded(deepcopy(model))
    config = replace(CONFIG, watermark=0.0)
    head, engine, _ = run_compiled(model, config, requests(0.8, is_plain=True), kind, pages=9)
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


@pytest.mark.parametrize("convert", [pack, quantize_int8])
def test_weights_in_other_layouts_are_read(model, convert):
    """The target's own projection is packed or rounded when heads are attached to it."""
    plain = rounded(deepcopy(model))
    expected = compile_head(make_head("self", plain))
    found = compile_head(make_head("self", convert(deepcopy(plain))))
    assert (found.weights == expected.weights).all()
    np.testing.assert_allclose(found.floats, expected.floats, rtol=1e-6)
