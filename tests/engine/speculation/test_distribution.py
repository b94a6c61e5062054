"""Sampled outputs have the target's distribution for each way of drafting and verifying.

The drafter has random weights, so that most of its tokens are rejected. Planted faults must be caught by the same test.
"""

from dataclasses import replace

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.drafters.base import TargetInfo
from engine.engine import build_engine
from engine.sampling.noise import uniforms
from engine.speculation import rejection, verify
from engine.speculation import speculation as speculation_module
from engine.speculation.selection import DraftSelection
from ssd.config import DrafterConfig
from tests.curves import line
from tests.engine.drafters.toy import ToyDrafter
from tests.engine.sampled_outputs import fits, new_target, sampled_requests
from tests.engine.speculation.test_rejection import FAULTS as REJECTION_FAULTS
from tests.engine.speculation.test_rejection import planted
from tests.engine.steps import AllTokens

KINDS = 4
"""Number of different tokens of outputs."""
CONFIG = EngineConfig(max_sequences=250, max_step_tokens=4000, max_draft=6, draft_shape="tree", kv_memory_mib=16)


@pytest.fixture(scope="module")
def target():
    return new_target()


class ByOwnProbability(AllTokens):
    """A selection that drops every token with a low `accept_prob`."""

    def select(self, plan, drafts, usable):
        lengths = []
        for start, end in zip(drafts.offsets[:-1].tolist(), drafts.offsets[1:].tolist(), strict=True):
            unlikely = drafts.accept_prob[start:end] < 0.2
            lengths.append(int(unlikely.argmax()) if unlikely.any() else end - start)
        return np.array(lengths)


class BoastfulDrafter(ToyDrafter):
    """Sets accept_prob to a sampled token's own probability, which verification must not depend on."""

    def drafts(self, candidates, q, has_q):
        drafts = super().drafts(candidates, q, has_q)
        own = drafts.q[drafts.q_rows.clip(0), drafts.batch.tokens.astype(np.int64)].numpy()
        return replace(drafts, batch=replace(drafts.batch, accept_prob=own))


def is_right(target, kind=ToyDrafter, selection=None, verification="rejection", **how):
    """Whether outputs with a drafter have the target's distribution."""
    drafter = kind(DrafterConfig(), TargetInfo.from_model(target, CONFIG), **how)
    engine = build_engine(target, CONFIG, drafter)
    engine._speculation._selection = engine._selection = selection
    completions = engine.generate(sampled_requests(10_000, verification, kinds=KINDS))
    assert sum(each.accepted for each in completions) > len(completions) / 5
    return fits(target, [each.tokens for each in completions], KINDS)


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
def test_outputs_have_the_targets_distribution(target, way, verification):
    assert is_right(target, verification=verification, **WAYS[way])


def test_selection_does_not_depend_on_a_sampled_tokens_probability(target):
    assert is_right(target, BoastfulDrafter, ByOwnProbability(), width=1)


def test_outputs_have_the_targets_distribution_with_the_token_budget(target, monkeypatch):
    monkeypatch.setattr(speculation_module, "perf_counter", lambda: 0.0)  # No backoff from measured times.
    assert is_right(target, selection=DraftSelection(line(0.002)), width=3, depth=2)


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
def test_faults_planted_in_paths_are_caught(target, monkeypatch, fault):
    fault(monkeypatch)
    selection = ByOwnProbability() if fault is budget_sees_tokens else None
    assert not is_right(target, BoastfulDrafter, selection, width=1)


@pytest.mark.parametrize("fault", ["p stays for the next candidate", "q stays for the next candidate"])
def test_faults_planted_among_siblings_are_caught(target, monkeypatch, fault):
    faulty = planted(*REJECTION_FAULTS[fault])
    monkeypatch.setattr(verify, "verify_by_rejection", faulty.verify_by_rejection)
    assert not is_right(target, width=3, depth=2)
