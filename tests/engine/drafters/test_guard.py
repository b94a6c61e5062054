"""Drafts of a faulty drafter are dropped, and its faults are reported once."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.drafters.base import TargetOutputs
from engine.drafters.drafts import Drafts, ExtraRows
from engine.drafters.guard import DraftsError, GuardedDrafter, check_drafts, check_extra_rows
from engine.scheduling.sequence import UNLIMITED
from engine.scheduling.table import MAX_DRAFT, RequestTable
from ssd.errors import MAX_FAILURES
from ssd.types import DraftBatch
from tests.engine.steps import counted_plan

VOCAB = 10


def batch_of(tokens=(1, 2, 3), parents=(-1, 0, -1), lengths=(2, 1), accept_prob=(1.0, 0.5, 0.0), dtype=np.uint32):
    return DraftBatch(
        np.array(tokens, dtype),
        np.array(parents, np.int32),
        np.array(accept_prob, np.float32),
        np.zeros(len(tokens), np.uint8),
        np.concatenate(([0], np.cumsum(lengths))).astype(np.uint32),
    )


def test_valid_drafts_pass():
    check_drafts(Drafts(batch_of()), np.array([2, 1]), VOCAB)
    check_drafts(Drafts.empty(3), np.array([0, 0, 0]), VOCAB)


def extra_of(batch):
    return ExtraRows(batch.tokens, batch.parents, batch.offsets)


def test_valid_extra_rows_pass():
    check_extra_rows(extra_of(batch_of()), np.array([2, 1]), VOCAB)
    check_extra_rows(extra_of(DraftBatch.empty(2)), np.array([0, 0]), VOCAB)


def test_extra_rows_of_another_type_are_refused():
    with pytest.raises(DraftsError, match="extra is list, not ExtraRows"):
        check_extra_rows([], np.array([2, 1]), VOCAB)


FAULTS = {
    "out-of-vocabulary token": (batch_of(tokens=(1, 10, 3)), "token id 10 is out of vocabulary"),
    "too many tokens": (batch_of(lengths=(1, 2)), "draft 1 has 2 tokens"),
    "its own parent": (batch_of(parents=(-1, 1, -1)), "does not come after its parent"),
    "a cycle": (batch_of(parents=(1, 0, -1)), "does not come after its parent"),
    "no such parent": (batch_of(parents=(-1, -2, -1)), "does not come after its parent"),
    "another number of drafts": (batch_of(lengths=(2, 1, 0)), "offsets do not divide"),
    "offsets beyond the tokens": (batch_of(lengths=(2, 2)), "offsets do not divide"),
    "descending offsets": (batch_of(lengths=(4, -1)), "offsets do not divide"),
    "signed tokens": (batch_of(dtype=np.int64), "tokens is not a 1-D uint32 array"),
    "fewer parents": (batch_of(parents=(-1, 0)), "parents has 2 elements for 3 tokens"),
    "not a probability": (batch_of(accept_prob=(1, 2, 0)), "not a probability"),
    "not a number": (batch_of(accept_prob=(1, np.nan, 0)), "not a probability"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_invalid_drafts_are_refused(fault):
    batch, message = FAULTS[fault]
    with pytest.raises(DraftsError, match=message):
        check_drafts(Drafts(batch), np.array([2, 1]), VOCAB)
    if "probability" not in message:
        with pytest.raises(DraftsError, match=message):
            check_extra_rows(extra_of(batch), np.array([2, 1]), VOCAB)


UNIFORM = torch.full((2, VOCAB), 1 / VOCAB)
DISTRIBUTIONS = {
    "a row that does not exist": (UNIFORM, [0, 2, -1], "beyond the 2 of q"),
    "a negative row": (UNIFORM, [0, -2, -1], "beyond the 2 of q"),
    "no q": (None, [0, -1, -1], "beyond the 0 of q"),
    "another vocabulary": (UNIFORM[:, 1:], [0, 1, -1], "not of the vocabulary's 10"),
    "too few rows": (UNIFORM, [0, 1], "not a 1-D int32 array"),
    "numpy": (UNIFORM.numpy(), [0, 1, -1], "not a dense float32 tensor"),
    "float64": (UNIFORM.double(), [0, 1, -1], "not a dense float32 tensor"),
    "sparse": (UNIFORM.to_sparse(), [0, 1, -1], "not a dense float32 tensor"),
    "without data": (UNIFORM.to("meta"), [0, 1, -1], "not a dense float32 tensor"),
    "a gradient": (UNIFORM.clone().requires_grad_(), [0, 1, -1], "inference_mode"),
    "not a number": (UNIFORM * float("nan"), [0, 1, -1], "not a probability distribution"),
    "negative": (UNIFORM - torch.eye(VOCAB)[:2] + torch.eye(VOCAB)[2:4], [0, 1, -1], "not a probability distribution"),
    "not normalized": (2 * UNIFORM, [0, 1, -1], "not a probability distribution"),
}


def test_valid_sampled_drafts_pass():
    check_drafts(Drafts(batch_of(), UNIFORM, np.array([0, 1, -1], np.int32)), np.array([2, 1]), VOCAB)


@pytest.mark.parametrize("fault", DISTRIBUTIONS)
def test_invalid_distributions_are_refused(fault):
    q, rows, message = DISTRIBUTIONS[fault]
    with pytest.raises(DraftsError, match=message):
        check_drafts(Drafts(batch_of(), q, np.array(rows, np.int32)), np.array([2, 1]), VOCAB)


@pytest.mark.parametrize(
    ("tokens", "rows", "message"),
    [
        ((1, 2, 3), [0, 1, 0], "different rows"),
        ((1, 2, 1), [0, 0, 0], "the same token"),
        ((1, 2, 1), [0, -1, 0], "the same token"),
        ((1, 2, 3), [0, 0, 0], None),
        ((1, 2, 1), [-1, 0, 0], None),
    ],
)
def test_sampled_siblings_must_be_different_tokens_of_one_distribution(tokens, rows, message):
    siblings = batch_of(tokens=(*tokens, 1), parents=(-1, -1, -1, -1), lengths=(3, 1), accept_prob=(1, 1, 1, 1))
    drafts = Drafts(siblings, UNIFORM, np.array([*rows, 1], np.int32))
    if message is None:
        check_drafts(drafts, np.array([3, 1]), VOCAB)
    else:
        with pytest.raises(DraftsError, match=message):
            check_drafts(drafts, np.array([3, 1]), VOCAB)


class Faulty:
    needs = TargetOutputs(top_k=3)

    def __getattr__(self, name):
        def fail(*_):
            raise RuntimeError(f"broken {name}")

        return fail


def plan_of(count, extra_room=0):
    plan = counted_plan(count, room=1, extra_rooms=np.full(count, extra_room))
    plan.table = RequestTable(count, 1)
    plan.table.state[:, MAX_DRAFT] = UNLIMITED
    return plan


def test_exceptions_are_contained_and_reported_once(caplog):
    guarded = GuardedDrafter(Faulty(), VOCAB)
    assert guarded.needs.top_k == 3
    with caplog.at_level(logging.WARNING):
        guarded.start(None)
        assert len(guarded.propose(plan_of(2)).batch) == 2
        guarded.observe(None)
        guarded.finish(None, learn=True)
        guarded.close()
    assert guarded.failures.count == 5
    [record] = caplog.records
    assert "RuntimeError: broken start" in record.getMessage()
    caplog.clear()


def test_a_drafter_that_fails_again_and_again_is_switched_off(caplog):
    class Failing:
        calls = closed = 0

        def propose(self, plan):
            self.calls += 1
            # It works in every 50th step of the first hundred.
            if self.calls in (50, 100):
                return Drafts.empty(2)
            raise RuntimeError("broken")

        def close(self):
            self.closed += 1

    guarded = GuardedDrafter(Failing(), VOCAB)
    with caplog.at_level(logging.WARNING):
        for _ in range(300):
            assert len(guarded.propose(plan_of(2)).batch) == 2
    assert guarded.inner.calls == 100 + MAX_FAILURES
    assert guarded.failures.count == 98 + MAX_FAILURES
    assert guarded.failures.is_off
    first, last = (record.getMessage() for record in caplog.records)
    assert first.endswith("continuing without its drafts")
    assert "switched off until this process is restarted" in last
    assert f"({97 + MAX_FAILURES} failures since the last message)" in last
    guarded.close()
    assert guarded.inner.closed == 1
    caplog.clear()


def test_a_drafter_that_is_switched_off_finishes_what_it_has_started(caplog):
    class Failing(Faulty):
        def __init__(self):
            self.finished = []

        def finish(self, sequence, learn):
            self.finished.append((sequence, learn))
            raise RuntimeError("broken finish")

    guarded = GuardedDrafter(Failing(), VOCAB)
    guarded.start("early")
    for _ in range(MAX_FAILURES):
        guarded.propose(plan_of(2))
    assert guarded.failures.is_off
    guarded.start("late")
    count = guarded.failures.count
    guarded.observe(None)
    for sequence in ("late", "early", "early"):
        guarded.finish(sequence, learn=True)
    assert guarded.inner.finished == [("early", True)]
    assert guarded.failures.count == count + 1
    caplog.clear()


class Partly:
    """Drafts the batches that it was given, by the name of the method."""

    needs = TargetOutputs()

    def __init__(self, **drafts):
        self.drafts = drafts

    def __getattr__(self, name):
        return lambda *_: self.drafts[name]


def one_token_each(tokens):
    return batch_of(tokens, [-1] * 3, [1] * 3, [0.5] * 3)


def test_an_invalid_draft_is_dropped_alone(caplog):
    extra = extra_of(batch_of((7,), (-1,), (0, 1, 0), (1,)))
    drafts = Drafts(one_token_each((1, VOCAB, 3)), UNIFORM, np.array([0, 1, 1], np.int32), extra)
    guarded = GuardedDrafter(Partly(propose=drafts), VOCAB)
    with caplog.at_level(logging.WARNING):
        kept = guarded.propose(plan_of(3, 1))
    assert [kept.batch.tokens_of(at).tolist() for at in range(3)] == [[1], [], [3]]
    assert (kept.q_rows.tolist(), kept.q is UNIFORM, kept.extra is extra) == ([0, 1], True, True)
    assert guarded.failures.count == 1
    [record] = caplog.records
    assert "token id 10 is out of vocabulary" in record.getMessage()
    caplog.clear()


@pytest.mark.parametrize(
    "faulty",
    [
        {"offsets": np.array([0, 1, 2], np.uint32)},
        {"accept_prob": np.ones(3)},
        {"tokens": np.full(3, VOCAB, np.uint32)},
    ],
    ids=["offsets", "dtype", "all"],
)
def test_nothing_is_drafted_from_a_batch_without_a_valid_draft(faulty, caplog):
    guarded = GuardedDrafter(Partly(propose=Drafts(replace(one_token_each((1, 2, 3)), **faulty))), VOCAB)
    assert len(guarded.propose(plan_of(3, 1)).batch.tokens) == 0
    assert guarded.failures.count == 1
    caplog.clear()
