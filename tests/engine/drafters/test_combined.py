"""Combinations of drafters through the engine, with random weights."""

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from engine.drafters.base import NO_OUTPUTS, Drafter
from engine.drafters.combined import CombinedDrafter, Component
from engine.drafters.drafts import Drafts
from engine.drafters.lookahead import LookaheadDrafter
from engine.drafters.options import LookaheadOptions
from engine.drafters.sources import sum_by_name
from engine.drafters.tokens import adapt
from engine.engine import build_engine
from engine.scheduling.request import Request
from engine.scheduling.result import StepResult
from engine.scheduling.sequence import Sequence
from ssd.baselines.ngram import NgramDrafter
from ssd.config import DrafterConfig
from ssd.drafter import SuffixDrafter
from ssd.types import DraftBatch, Path
from tests.engine.drafters.networks import CONFIG, TOLERANCE, Recorder, new_drafter, plain_outputs, requests, tokens_of
from tests.engine.drafters.networks import run as run_drafter
from tests.engine.steps import Entry, counted_plan, plan_of


def make_part(kind, model, has_trees):
    shape = "tree" if has_trees else "path"
    if kind == "ssd":
        return Component(
            kind, adapt(SuffixDrafter(DrafterConfig(capacity=10_000, max_draft=16, draft_shape=shape))), False
        )
    if kind == "ngram":
        return Component(kind, adapt(NgramDrafter()), False)
    if kind == "lookahead":
        return Component(kind, LookaheadDrafter(LookaheadOptions(4, 4, 3), has_trees=has_trees), False)
    return Component(kind, new_drafter(kind, model, replace(CONFIG, draft_shape=shape), is_coupled=True), True)


@pytest.fixture(scope="module")
def plain(model):
    return plain_outputs(model)


def run(model, config, submitted, kinds, pages=None):
    has_trees = config.draft_shape == "tree"
    drafter = CombinedDrafter([make_part(kind, model, has_trees) for kind in kinds], has_trees=has_trees)
    _, completions = run_drafter(model, config, submitted, drafter, pages)
    return drafter, completions


@pytest.mark.parametrize(
    ("kinds", "temperature", "shape", "verification"),
    [
        (("ssd", "mtp"), 0.0, "path", "exact"),
        (("ssd", "mtp"), 0.8, "path", "rejection"),
        (("ssd", "mtp"), 0.8, "tree", "rejection"),
        (("self", "ssd"), 0.8, "path", "exact"),
        (("ngram", "draft-model", "medusa"), 0.8, "path", "exact"),
        (("ngram", "draft-model", "medusa"), 0.0, "tree", "exact"),
        (("mtp", "eagle3"), 0.8, "tree", "exact"),
        (("lookahead", "ssd"), 0.8, "tree", "exact"),
    ],
)
def test_outputs_equal_plain_decoding(model, plain, kinds, temperature, shape, verification):
    """In rejection mode, too."""
    # The second half repeats the first, so that the corpus has drafts.
    submitted = requests(temperature, 6) + requests(temperature, 6)
    _, completions = run(model, replace(CONFIG, draft_shape=shape, verification=verification), submitted, kinds)
    assert tokens_of(completions) == 2 * plain(temperature, 6)
    assert sum(each.drafted for each in completions) > 100
    assert sum(each.accepted for each in completions) > 0
    counts = sum_by_name(each.by_source for each in completions)
    if "ssd" in kinds:
        assert sum(counts[name].drafted for name in ("corpus", "local") if name in counts) > 20
    assert sum(counts[name].drafted for name in ("draft-model", "medusa", "lookahead") if name in counts) > 20


@pytest.mark.parametrize("kind", ["mtp", "draft-model"])
def test_slots_of_a_combined_head_are_right(model, plain, monkeypatch, kind):
    """Accepted tokens of other drafters, preemption and shared pages do not disturb the head's slots."""
    recorder, config = Recorder(monkeypatch), replace(CONFIG, watermark=0.0, draft_shape="tree")
    drafter, completions = run(model, config, requests(0.8) + requests(0.8), ("ssd", kind), pages=12)
    assert tokens_of(completions) == 2 * plain(0.8)
    assert recorder.largest_difference(drafter.parts[1].drafter.head, model) < TOLERANCE


def test_a_perfect_corpus_and_a_perfect_model_are_not_worse_together(model):
    """A copy of the target and a corpus that has seen the outputs: nearly all draft tokens are accepted."""
    submitted = requests(0.0, count=4)
    _, alone = run(model, CONFIG, submitted + submitted, ("self",))
    _, both = run(model, CONFIG, submitted + submitted, ("self", "ssd"))
    assert sum(each.steps for each in both) <= sum(each.steps for each in alone)


def test_requests_choose_among_the_drafters(model):
    config = replace(CONFIG, draft_shape="tree")
    base = requests(0.0, count=4)
    for chosen, expected in (
        (None, {"corpus", "local", "fallback", "draft-model"}),
        ("ssd", {"corpus", "local", "fallback"}),
        ("mtp", {"draft-model"}),
    ):
        submitted = [replace(each, drafters=None if chosen is None else frozenset({chosen})) for each in base + base]
        drafter = CombinedDrafter([make_part(kind, model, True) for kind in ("ssd", "mtp")], has_trees=True)
        for part in drafter.parts:
            if chosen not in (None, part.kind):
                part.drafter.propose = None  # It is not called.
        completions = build_engine(model, config, drafter, drafters=("ssd", "mtp")).generate(submitted)
        assert {source for each in completions for source in each.by_source} == expected


def test_a_faulty_drafter_keeps_no_call_from_the_others():
    drafters = [Mock(Drafter, needs=NO_OUTPUTS, copies=()) for _ in range(3)]
    combined = CombinedDrafter([Component("", drafter, False) for drafter in drafters], has_trees=False)
    sequence = Sequence(0, Request(np.array([1], np.uint32)), 9)
    calls = {
        "start": (sequence,),
        "observe": (StepResult(counted_plan(0), np.zeros((0, 3), np.int32)),),
        "finish": (sequence, True),
        "close": (),
    }
    for name, arguments in calls.items():
        getattr(drafters[1], name).side_effect = ValueError(name)
        with pytest.raises(ValueError, match=name):
            getattr(combined, name)(*arguments)
    assert [[call[0] for call in drafter.method_calls] for drafter in drafters] == [[*calls]] * 3


class OneToken(Drafter):
    """Drafts token 5."""

    def propose(self, plan):
        return Drafts(DraftBatch.from_paths([Path(np.array([5], np.uint32), np.full(1, 0.8, np.float32))]))


def test_a_draft_is_learned_from_once():
    """Steps without drafts may follow it."""
    combined = CombinedDrafter([Component(kind, OneToken(), False) for kind in "ab"], has_trees=False)
    plan = plan_of([Entry(Sequence(0, Request(np.array([1], np.uint32)), 9), 0, 1)])
    plan.rooms = np.array([4])
    result = StepResult(plan, np.array([[2, 1, 5, 6]], np.int32))
    result.lengths[:] = 2
    before = combined._mix.weights.copy()
    combined.propose(plan)
    combined.observe(result)
    learned = combined._mix.weights.copy()
    combined.observe(result)
    assert (learned != before).any()
    assert np.array_equal(combined._mix.weights, learned)
