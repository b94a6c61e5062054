"""Arctic Inference's drafter in `advise`: how it is called, and when it is replayed."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from drafter_service.commands.advise import advice, arctic
from drafter_service.commands.advise.arctic import ArcticDrafter, settings_for
from ssd.budget.cost_profile import CostProfile
from ssd.types import Progress
from tests.drafter_service.commands.advise.logs import repeated_requests
from tests.replay import recording_of

CHEAP = CostProfile("test", "tiny", {n: {1: 100.0 + 0.1 * n, 64: 100.0 + 0.1 * n} for n in (1, 10_000)})


class RecordedCache:
    """Takes the place of the package's cache: records its calls, and drafts one tree."""

    def __init__(self, **settings):
        self.calls = []

    def start_request(self, sequence_id, prompt):
        self.calls.append(("start", sequence_id, prompt.tolist()))

    def add_active_response(self, sequence_id, tokens):
        self.calls.append(("add", sequence_id, tokens.tolist()))

    def stop_request(self, sequence_id):
        self.calls.append(("stop", sequence_id))

    def speculate(self, sequence_id, context, **settings):
        self.calls.append(("speculate", sequence_id, context.tolist(), settings))
        return SimpleNamespace(token_ids=[5, 6, 7], parents=[-1, 0, -1], probs=[0.5, 0.25, 0.125])


@pytest.fixture
def recorded(monkeypatch):
    """The package with a recording cache."""
    package, module = ModuleType("arctic_inference"), ModuleType("arctic_inference.suffix_decoding")
    module.SuffixDecodingCache = RecordedCache
    monkeypatch.setitem(sys.modules, "arctic_inference", package)
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", module)


def test_requests_are_passed_on_with_signed_tokens_and_the_end_of_the_context(recorded):
    drafter, prompt = ArcticDrafter(*settings_for(0.02)), np.arange(100, dtype=np.uint32)
    drafter.start(3, prompt)
    drafter.draft(Progress.of_one(3, np.array([], np.uint32), max_draft=8))
    batch = drafter.draft(Progress.of_one(3, np.array([9, 8], np.uint32), max_draft=8))
    drafter.finish(3, np.array([1], np.uint32), verified=3)
    settings = {"max_spec_tokens": 8, "max_spec_factor": 4.0, "min_token_prob": 0.05, "use_tree_spec": True}
    assert drafter._cache.calls == [
        ("start", 3, list(range(100))),
        ("speculate", 3, list(range(36, 100)), settings),
        ("add", 3, [9, 8]),
        ("speculate", 3, [*range(38, 100), 9, 8], settings),
        ("add", 3, [1]),
        ("stop", 3),
    ]
    assert batch.tokens.tolist() == [5, 6, 7]
    assert batch.parents.tolist() == [-1, 0, -1]
    # Probabilities given the parent.
    assert batch.accept_prob.tolist() == [0.5, 0.5, 0.125]
    assert settings_for(0.1) == (1.0, 0.1)


@pytest.mark.parametrize("is_installed", [True, False])
def test_it_is_replayed_where_it_is_installed(monkeypatch, is_installed):
    monkeypatch.setattr(arctic, "is_installed", lambda: is_installed)
    trials = advice.plan_samples(recording_of(repeated_requests()), CHEAP, 1)
    assert ("arctic" in {trial.drafter for trial in trials}) == is_installed
