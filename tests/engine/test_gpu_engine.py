"""Complete engines: with any drafter and number of steps in flight, outputs are those of decoding without drafts.

In float32 with plain attention they are equal. In 16 bits with FlashInfer on a GPU they may differ at near ties, whose
number is reported; on the CPU, FlashInfer's twin computes in float32, which has none. Sampled outputs also have the
model's distribution.
"""

from contextlib import closing
from dataclasses import replace
from itertools import cycle
from typing import NamedTuple

import pytest
import torch

from engine.config import EngineConfig
from engine.drafters.autoregressive import AutoregressiveDrafter
from engine.drafters.registry import build_drafter
from engine.engine import build_engine
from engine.executor import fixed_step
from engine.executor.kernels.verify import verify
from engine.models.hf_config import config_to_hf
from engine.models.loader import load_model, save_model
from engine.models.packed import pack
from engine.speculation import verify as verification
from ssd.baselines.none import NoDrafter
from ssd.config import DrafterConfig
from tests.engine.drafters.heads import make_head
from tests.engine.flashinfer_twin import LIBRARIES, library_of
from tests.engine.sampled_outputs import VOCAB, fits, new_target, sampled_requests
from tests.engine.steps import accepting
from tests.engine.test_core import outputs, requests
from tests.engine.trees import ScriptedDrafter

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Few shapes, because each engine on a GPU captures all of them.
CONFIG = EngineConfig(max_sequences=4, max_step_tokens=256, max_draft=6, kv_memory_mib=64)
DRAFTERS = ("none", "ngram", "ssd")


def drafter_of(name):
    # Drafts are longer than a step verifies, so that they also cover the step after the one in flight.
    return build_drafter(name, DrafterConfig(capacity=10_000, max_draft=13), warn=pytest.fail)


def twice(model, config, drafter, attention, sent):
    """Outputs of two runs with the same drafter, and the number of draft tokens accepted in the second run."""
    with closing(build_engine(model, config, drafter_of(drafter), attention=attention)) as engine:
        first = outputs(engine, sent)
        again = engine.generate(sent)
    return first, [one.tokens.tolist() for one in again], sum(one.accepted for one in again)


SETTINGS = {
    "greedy": [{}],
    "sampled": [
        {"temperature": 1.0},
        {"temperature": 0.9, "top_k": 5},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 1.2, "min_p": 0.1},
    ],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", SETTINGS)
def test_in_float32_outputs_do_not_depend_on_drafts_or_steps_in_flight(model_folder, device, kind):
    model = pack(load_model(model_folder, device=device))
    sent = [
        replace(request, sampling=replace(request.sampling, **settings))
        for request, settings in zip(requests(8 if device == "cuda" else 4), cycle(SETTINGS[kind]), strict=False)
    ]
    expected = outputs(build_engine(model, CONFIG, NoDrafter(), attention="plain"), sent)
    for in_flight in (0, 1):
        for drafter in DRAFTERS:
            first, again, accepted = twice(model, replace(CONFIG, in_flight=in_flight), drafter, "plain", sent)
            assert first == again == expected, (in_flight, drafter)
            assert drafter != "ssd" or accepted > 50


MAX_ULP = 2
"""Largest distance of the two best logits of a near tie, in units in the last place of bfloat16."""
BITS = 8
"""Number of bits of bfloat16's significand."""


class Best(NamedTuple):
    """The reference's two best tokens at a position, and the distance of their logits in units in the last place."""

    tokens: list[int]
    gap_ulp: float


class Reference(NamedTuple):
    """The output of a single request without drafts."""

    tokens: list[int]
    best: list[Best]
    """One per token."""


class Difference(NamedTuple):
    """The first position where an output differs from the reference."""

    request: int
    place: int
    gap_ulp: float
    is_near_tie: bool


def references(model, config, attention, submitted):
    """Greedy outputs of single requests; prompts run in one step. config: gives the KV cache's settings."""
    alone = EngineConfig(max_sequences=1, max_draft=0, kv_memory_mib=config.kv_memory_mib)
    engine = build_engine(model, alone, NoDrafter(), attention=attention)
    engine._graph = None  # logits can only be read in eager steps
    runner, found = engine._executor.runner, []
    forward = runner.forward_with_states
    best = []

    def with_best(batch, layers):
        logits, states = forward(batch, layers)
        best.append(best_two(logits[-1]))
        return logits, states

    runner.forward_with_states = with_best
    for number, request in enumerate(submitted):
        best.clear()
        [completion] = engine.generate([replace(request, salt=f"{number}")])  # They share no pages.
        assert len(best) == len(completion.tokens)
        found.append(Reference(completion.tokens.tolist(), list(best)))
    return found


def best_two(logits):
    values, tokens = logits.double().topk(2)
    ulp = 2.0 ** (torch.floor(torch.log2(values.abs().max())) + 1 - BITS)
    return Best(tokens.tolist(), float((values[0] - values[1]) / ulp))


def differences(got, expected):
    """The first position where each output differs; tokens after it have a different context."""
    found = []
    for request, (tokens, reference) in enumerate(zip(got, expected, strict=True)):
        assert len(tokens) == len(reference.tokens)
        differ = [place for place, token in enumerate(tokens) if token != reference.tokens[place]]
        if differ:
            best = reference.best[differ[0]]
            is_near_tie = tokens[differ[0]] in best.tokens and best.gap_ulp <= MAX_ULP
            found.append(Difference(request, differ[0], best.gap_ulp, is_near_tie))
    return found


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request):
    with library_of(request.param) as there:
        yield there


def test_with_drafts_made_on_the_device_outputs_differ_only_at_near_ties(library, wide_folder):
    """The head attends to a slot before its first one, which holds what another sequence left there."""
    model = load_model(wide_folder, dtype=library.dtype, device=library.device)
    sent = requests(16 if library.device == "cuda" else 2, max_tokens=30)
    config = replace(CONFIG, max_draft=4, in_flight=1)
    expected = references(model, config, "flashinfer", sent)
    head = make_head("mtp", model).to(library.device)
    for parameter in head.parameters():
        parameter.data = parameter.data.to(library.dtype)
    drafter = AutoregressiveDrafter(head, depth=4, has_trees=False, source=4)
    bind = drafter.bind

    def bind_to_used_cache(forward):
        [attention] = forward._own
        attention._cache.layers.normal_(generator=torch.Generator(library.device).manual_seed(0))
        bind(forward)

    drafter.bind = bind_to_used_cache
    with closing(build_engine(model, config, drafter, attention="flashinfer")) as engine:
        completions = engine.generate(sent)
    assert all(completion.drafted > 20 for completion in completions)
    found = differences([completion.tokens.tolist() for completion in completions], expected)
    assert all(difference.is_near_tie for difference in found), found
    assert not found or library.dtype != torch.float32


def test_in_16_bits_outputs_differ_only_at_near_ties(library, wide_folder):
    model = pack(load_model(wide_folder, dtype=library.dtype, device=library.device))
    sent = requests(16 if library.device == "cuda" else 2, max_tokens=30)
    expected = references(model, CONFIG, "flashinfer", sent)
    for in_flight in (0, 1):
        for drafter in DRAFTERS:
            first, again, accepted = twice(model, replace(CONFIG, in_flight=in_flight), drafter, "flashinfer", sent)
            found = [*differences(first, expected), *differences(again, expected)]
            most = max((difference.gap_ulp for difference in found), default=0.0)
            name = f"{library.dtype}, {in_flight} in flight, {drafter}".removeprefix("torch.")
            print(f"{name}: {len(found)} of {2 * len(sent)} outputs differ from the reference, at up to {most:.1f} ulp")
            assert all(difference.is_near_tie for difference in found), (name, found)
            assert not found or library.dtype != torch.float32
            assert drafter != "ssd" or accepted > 20


def test_differences_are_classified_by_the_reference():
    best = [Best([7, 3], 9.0), Best([5, 2], 1.5), Best([4, 1], 0.0)]
    reference = Reference([7, 5, 4], best)
    assert differences([[7, 5, 4]], [reference]) == []
    for tokens, place, is_near_tie in (
        ([7, 2, 9], 1, True),
        ([7, 9, 4], 1, False),  # neither of the two best
        ([3, 5, 4], 0, False),  # no tie
        ([7, 5, 1], 2, True),
    ):
        [difference] = differences([tokens], [reference])
        assert (difference.place, difference.is_near_tie) == (place, is_near_tie)


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory):
    """A model with few tokens, whose distributions the statistical tests compute."""
    target, folder = new_target(), tmp_path_factory.mktemp("small")
    save_model(target, folder, config_to_hf(target.config, "float32"), dtype=torch.float32)
    return folder


def all_accepted(monkeypatch):
    """Accept all draft tokens."""

    def verify_all(state, slots, inputs, target_tokens, width):
        row = torch.arange(len(target_tokens), device=target_tokens.device)
        starts = inputs.starts[:-1, None]
        has_next = ((row >= starts) & (row < starts + inputs.counts[:, None] - 1)).any(dim=0)
        return verify(state, slots, inputs, torch.where(has_next, inputs.tokens.roll(-1), target_tokens), width)

    monkeypatch.setattr(verification, "accept_exactly", accepting(lambda draft, *_: range(len(draft))))
    monkeypatch.setattr(fixed_step, "verify", verify_all)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("bug", [None, all_accepted], ids=["as it is", "planted bug"])
def test_sampled_outputs_have_the_models_distribution(small_folder, device, in_flight, bug, monkeypatch):
    if bug is not None:
        bug(monkeypatch)
    config = EngineConfig(max_sequences=16, max_step_tokens=256, max_draft=2, kv_memory_mib=16, in_flight=in_flight)
    # Wrong tokens, and right ones where the target is likely to sample them.
    drafter = ScriptedDrafter(lambda number, length: [(number + length) % VOCAB] * 2)
    model = load_model(small_folder, device=device)
    completions = build_engine(model, config, drafter, attention="plain").generate(sampled_requests(10_000, "exact"))
    drafted, accepted = (sum(getattr(one, name) for one in completions) for name in ("drafted", "accepted"))
    assert drafted > accepted > 50 or (bug is not None and drafted == accepted)
    assert fits(load_model(small_folder), [one.tokens for one in completions]) == (bug is None)
