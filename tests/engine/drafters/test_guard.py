"""Faulty drafters lose their drafts, and are reported once."""

import logging

import numpy as np
import pytest

from engine.drafters.base import Drafts, TargetOutputs
from engine.drafters.guard import DraftsError, GuardedDrafter, check_drafts
from ssd.types import DraftBatch

VOCAB = 10


def batch_of(tokens=(1, 2, 3), parents=(-1, 0, -1), lengths=(2, 1), accept_prob=(1.0, 0.5, 0.0), dtype=np.uint32):
    return DraftBatch(
        np.array(tokens, dtype),
        np.array(parents, np.int32),
        np.array(accept_prob, np.float32),
        np.zeros(len(tokens), np.uint8),
        np.concatenate(([0], np.cumsum(lengths))).astype(np.uint32),
    )


def test_sound_drafts_pass():
    check_drafts(Drafts(batch_of()), [2, 1], VOCAB)
    check_drafts(Drafts.empty(3), [0, 0, 0], VOCAB)


FAULTS = {
    "out-of-vocabulary token": (batch_of(tokens=(1, 10, 3)), "token id 10 is out of vocabulary"),
    "too many tokens": (batch_of(lengths=(1, 2)), "draft 1 has 2 tokens"),
    "its own parent": (batch_of(parents=(-1, 1, -1)), "does not come after its parent"),
    "a cycle": (batch_of(parents=(1, 0, -1)), "does not come after its parent"),
    "no such parent": (batch_of(parents=(-1, -2, -1)), "does not come after its parent"),
    "another number of drafts": (batch_of(lengths=(2, 1, 0)), "offsets do not divide"),
    "offsets beyond the tokens": (batch_of(lengths=(2, 2)), "offsets do not divide"),
    "descending offsets": (batch_of(lengths=(4, -1)), "offsets do not divide"),
    "signed tokens": (batch_of(dtype=np.int64), "tokens is not a row of uint32"),
    "fewer parents": (batch_of(parents=(-1, 0)), "parents has 2 elements for 3 tokens"),
    "not a probability": (batch_of(accept_prob=(1, 2, 0)), "not a probability"),
    "not a number": (batch_of(accept_prob=(1, np.nan, 0)), "not a probability"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_drafts_that_cannot_be_verified(fault):
    batch, message = FAULTS[fault]
    with pytest.raises(DraftsError, match=message):
        check_drafts(Drafts(batch), [2, 1], VOCAB)


@pytest.mark.parametrize(
    ("shape", "rows", "message"),
    [
        ((2, VOCAB), [0, 2, -1], "beyond the 2 of q"),
        ((2, VOCAB), [0, -2, -1], "beyond the 2 of q"),
        ((2, VOCAB - 1), [0, 1, -1], "not of the vocabulary's 10"),
        ((2, VOCAB), [0, 1], "not a row of int32, one per token"),
        (None, [0, -1, -1], "beyond the 0 of q"),
    ],
)
def test_distributions_that_do_not_fit(shape, rows, message):
    q = None if shape is None else np.zeros(shape)
    with pytest.raises(DraftsError, match=message):
        check_drafts(Drafts(batch_of(), q, np.array(rows, np.int32)), [2, 1], VOCAB)


class Faulty:
    needs = TargetOutputs(top_k=3)

    def __getattr__(self, name):
        def fail(*_):
            raise RuntimeError(f"broken {name}")

        return fail


class Plan:
    producing = ("one", "two")


def test_exceptions_are_contained_and_reported_once(caplog):
    guarded = GuardedDrafter(Faulty(), VOCAB)
    assert guarded.needs.top_k == 3
    with caplog.at_level(logging.WARNING):
        guarded.start(None)
        assert len(guarded.propose(Plan).batch) == 2
        assert guarded.propose_after(Plan) is None
        guarded.observe(None)
        guarded.finish(None, learn=True)
        guarded.close()
    assert guarded.problems == 6
    [record] = caplog.records
    assert "RuntimeError: broken start" in record.getMessage()
    caplog.clear()
