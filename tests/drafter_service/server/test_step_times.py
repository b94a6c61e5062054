"""What a service learns from the durations of steps: of each engine for itself, and whatever they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drafter_service.server.session import Session
from drafter_service.settings.tree import Limits
from drafter_service.transport.wire import batch_message
from ssd.config import DrafterConfig
from ssd.types import StepTime
from tests.drafter_service.raw import batch, drafted, start
from tests.drafter_service.server.opened_namespaces import answered, still_namespace
from tests.replay import progress_of

LOOP = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 2
CONFIG = DrafterConfig(capacity=10_000, refresh_interval_s=3600, max_draft=32)


@pytest.fixture
def namespace():
    with still_namespace(CONFIG) as namespace:
        yield namespace


def ran(*steps, committed=(), verified=0, limit=32):
    """Return a batch of sequence 1 that reports steps."""
    return batch_message(replace(progress_of({1: committed}, limit, verified), step_times=steps))


def teach(session, seconds_per_token):
    for index in range(300):
        tokens = 1 + index % 40
        answered(session, batch=ran(StepTime(tokens, 1, 1 + seconds_per_token * tokens)))


def test_each_engine_of_a_namespace_has_a_curve_of_its_own(namespace):
    sessions = [Session(namespace, Limits()) for _ in range(2)]
    for session, seconds_per_token in zip(sessions, (0.001, 0.3), strict=True):
        answered(session, starts=[start(1, LOOP)])
        teach(session, seconds_per_token)
    fast, slow = [drafted(answered(session, batch=batch({1: ()}, 32))) for session in sessions]
    assert len(fast) > 2 * len(slow) > 0
    assert namespace.budget_totals.sizes[:, 0].sum() > 500
    sessions[0].close()
    sessions[1].close()
    assert namespace.budget_totals.sizes[:, 0].sum() > 500, "totals of engines that have left are kept"


def test_drafts_that_cost_more_than_they_save_are_paused(namespace):
    session = Session(namespace, Limits())
    answered(session, starts=[start(1, LOOP)])
    pauses = []
    for _ in range(30):
        step = StepTime(2, 1, 0.01, drafting_s=0.02)
        response = answered(session, batch=ran(step, committed=[50], limit=1))
        pauses.append(response.drafts.pause_steps)
    assert any(pauses)


def test_a_configured_cost_is_not_corrected():
    with still_namespace(replace(CONFIG, cost=0.02)) as namespace:
        session = Session(namespace, Limits())
        answered(session, starts=[start(1, LOOP)])
        before = drafted(answered(session, batch=batch({1: ()}, 32)))
        teach(session, 0.5)
        assert drafted(answered(session, batch=batch({1: ()}, 32))) == before
