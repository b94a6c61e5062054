"""Drafts of a faulty drafter are not verified, and its faults are counted and reported once."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.drafters.base import Drafter
from engine.drafters.drafts import Drafts, ExtraRows
from engine.drafters.guard import DraftsError, GuardedDrafter, checked
from engine.drafters.registry import build_drafter
from engine.drafters.tokens import adapt
from engine.scheduling.request import Request
from engine.scheduling.sequence import UNLIMITED, Sequence
from engine.scheduling.table import MAX_DRAFT, RequestTable
from ssd.config import DrafterConfig
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


def extra_of(batch):
    return ExtraRows(batch.tokens, batch.parents, batch.offsets)


def check(drafts, rooms=(2, 1)):
    return checked(drafts, np.array(rooms), np.array(rooms), VOCAB)


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


NO_DRAFTS = DraftBatch.empty(2)
TREE = batch_of((1, 2, 3, 1), (-1, 0, 0, -1), (3, 1), (1,) * 4)


def sampled(batch, rows):
    return Drafts(batch, UNIFORM, np.array(rows, np.int32))


INVALID = {
    **{name: (Drafts(batch), message) for name, (batch, message) in FAULTS.items()},
    **{f"extra rows: {name}": (Drafts(NO_DRAFTS, extra=extra_of(batch)), message)
       for name, (batch, message) in FAULTS.items() if "probability" not in message},
    "extra rows of another type": (Drafts(NO_DRAFTS, extra=[]), "extra is list, not ExtraRows"),
    **{f"q: {name}": (Drafts(batch_of(), q, np.array(rows, np.int32)), message)
       for name, (q, rows, message) in DISTRIBUTIONS.items()},
    "q: a branch": (sampled(TREE, (0, 0, -1, 1)), "not a path"),
}  # fmt: skip
VALID = {
    "a tree": Drafts(batch_of()),
    "no drafts": Drafts(NO_DRAFTS),
    "extra rows": Drafts(NO_DRAFTS, extra=extra_of(batch_of())),
    "sampled": sampled(batch_of(), (0, 1, -1)),
    "a tree and a sampled path": sampled(TREE, (-1, -1, -1, 1)),
}


@pytest.mark.parametrize("name", [*INVALID, *VALID])
def test_only_drafts_that_can_be_verified_pass(name):
    rooms = (3, 1) if "branch" in name or "sampled path" in name else (2, 1)
    if name in VALID:
        assert check(VALID[name], rooms).batch.tokens.tolist() == VALID[name].batch.tokens.tolist()
    else:
        drafts, message = INVALID[name]
        with pytest.raises(DraftsError, match=message):
            check(drafts, rooms)


class Scripted(Drafter):
    """Drafts given batches; fails where there is none."""

    def __init__(self, *drafts):
        self.drafts, self.calls = list(drafts), []

    def start(self, sequence):
        self.calls.append("start")

    def propose(self, plan):
        self.calls.append("propose")
        return self.drafts.pop(0)

    def observe(self, result):
        raise RuntimeError("broken observe")

    def finish(self, sequence, learn):
        self.calls.append("finish")
        raise RuntimeError("broken finish")

    def close(self):
        self.calls.append("close")


def plan_of(count, extra_room=0):
    plan = counted_plan(count, room=1, extra_rooms=np.full(count, extra_room))
    plan.table = RequestTable(count, 1)
    plan.table.state[:, MAX_DRAFT] = UNLIMITED
    return plan


def new_sequence(sequence_id):
    return Sequence(sequence_id, Request(np.ones(1, np.uint32)), 8)


def test_a_drafter_that_fails_again_and_again_is_switched_off(caplog):
    """Failures with a success in between do not count. It still finishes what it has started, once."""
    working = [None] * 49 + [Drafts.empty(2)]
    guarded = GuardedDrafter(Scripted(*working, *working, *[None] * 200), VOCAB)
    early, late = new_sequence(0), new_sequence(1)
    with caplog.at_level(logging.WARNING):
        guarded.start(early)
        guarded.start(early)
        for _ in range(300):
            assert len(guarded.propose(plan_of(2)).batch) == 2
        guarded.start(late)
    assert guarded.failures.is_off
    assert guarded.failures.count == 98 + MAX_FAILURES
    first, last = (record.getMessage() for record in caplog.records)
    assert "AttributeError: 'NoneType'" in first
    assert first.endswith("continuing without its drafts")
    assert "switched off until this process is restarted" in last
    assert f"({97 + MAX_FAILURES} failures since the last message)" in last
    for sequence in (late, early, early):
        guarded.finish(sequence, learn=True)
    guarded.observe(None)
    guarded.close()
    assert guarded.inner.calls == ["start", *["propose"] * (100 + MAX_FAILURES), "finish", "close"]
    assert guarded.failures.count == 99 + MAX_FAILURES
    caplog.clear()


def test_drafts_of_third_parties_are_checked(caplog):
    """Invalid drafts count as a failed call; valid ones may be views, which kernels cannot read."""
    wide = np.zeros((2, 2), np.uint32) + np.uint32(3)
    views = Drafts(replace(batch_of((3, 3), (-1, -1), (1, 1), (1, 1)), tokens=wide[:, 0]))
    invalid = Drafts(batch_of((1, VOCAB), (-1, -1), (1, 1), (1, 1)))
    guarded = GuardedDrafter(Scripted(invalid, views), VOCAB)
    assert len(guarded.propose(plan_of(2)).batch.tokens) == 0
    assert guarded.failures.count == 1
    caplog.clear()
    drafts = guarded.propose(plan_of(2)).batch
    assert drafts.tokens.tolist() == [3, 3]
    assert drafts.tokens.flags.c_contiguous
    assert not guarded.inner.is_trusted
    assert adapt(build_drafter("ssd+ngram", DrafterConfig(capacity=5000))).is_trusted
