"""Calls that `TokenDrafter` makes to a drafter of tokens, whatever happens between two drafts."""

import numpy as np
import pytest

from engine.drafters.by_adapter import AdapterDrafters
from engine.drafters.reports import NOT_STARTED
from engine.drafters.tokens import TokenDrafter, adapt, innermost
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.result import StepResult
from engine.scheduling.sequence import Sequence
from engine.scheduling.table import RequestTable
from ssd.baselines.ngram import NgramDrafter
from ssd.drafter import SuffixDrafter
from ssd.types import DraftBatch, Path
from tests.engine.steps import plan_of_rows

PROMPT = np.array([5, 6, 7], np.uint32)
TABLE = RequestTable(300, 1)
"""Rows of all sequences of these tests."""


class Recorder:
    """Drafts the token 1 for every sequence, and records its calls."""

    def __init__(self, refused=()):
        self.refused = refused
        self.calls = []

    def start(self, sequence_id, prompt):
        if sequence_id in self.refused:
            raise ValueError("no room")
        self.calls.append(("start", sequence_id, prompt.tolist()))

    def draft(self, progress):
        steps = None if progress.steps is None else progress.steps.tolist()
        self.calls.append(("draft", progress.sequence_ids.tolist(), progress.tokens.tolist(),
                           progress.verified.tolist(), progress.max_draft.tolist(), steps))  # fmt: skip
        path = Path(np.array([1], np.uint32), np.array([0.5], np.float32))
        return DraftBatch.from_paths([path] * len(progress.sequence_ids))

    def finish(self, sequence_id, tokens, *, verified=0, learn=True):
        self.calls.append(("finish", sequence_id, tokens.tolist(), verified, learn))

    def close(self):
        self.calls.append(("close",))


def new_sequence(sequence_id=0, **settings):
    sequence = Sequence(sequence_id, Request(PROMPT, SamplingParams(max_tokens=20), **settings), 23)
    TABLE.add(sequence)
    return sequence


def plan_of(*sequences, room=4):
    return plan_of_rows(TABLE, sequences, room)


def run_step(drafter, plan, tokens, drafted=0, kept=0):
    """Commit `tokens` to every sequence of a plan, and pass the results to the drafter."""
    for sequence in plan.producing:
        for token in tokens:
            append(sequence, token)
    values = np.zeros((plan.producers, 2 + len(tokens)), np.int32)
    values[:, :2], values[:, 2:] = (1 + kept, drafted), tokens
    result = StepResult(plan, values)
    result.lengths[:] = len(tokens)
    drafter.observe(result)


def append(sequence, token):
    sequence.commit(np.array([token], np.uint32))


def test_committed_and_verified_tokens_are_reported():
    drafter, sequence = TokenDrafter(Recorder()), new_sequence()
    drafter.start(sequence)
    plan = plan_of(sequence)
    assert drafter.propose(plan).batch.tokens.tolist() == [1]
    run_step(drafter, plan, [1, 8], drafted=1, kept=1)
    drafter.propose(plan_of(sequence, room=2))
    run_step(drafter, plan, [9])
    drafter.finish(sequence, learn=True)
    assert drafter.inner.calls == [
        ("start", 0, [5, 6, 7]),
        ("draft", [0], [], [0], [4], None),
        ("draft", [0], [1, 8], [1], [2], None),
        ("finish", 0, [9], 0, True),
    ]


def test_steps_without_a_draft_are_reported_together():
    drafter, sequence = TokenDrafter(Recorder()), new_sequence()
    drafter.start(sequence)
    plan = plan_of(sequence)
    drafter.propose(plan)
    run_step(drafter, plan, [8], drafted=1)
    run_step(drafter, plan, [9])
    drafter.propose(plan)
    for token in (10, 11):
        run_step(drafter, plan, [token])
    drafter.finish(sequence, learn=False)
    assert drafter.inner.calls[2:] == [
        ("draft", [0], [8, 9], [1], [4], [2]),
        ("draft", [0], [10, 11], [0], [0], [2]),
        ("finish", 0, [], 0, False),
    ]


def test_prompt_steps_are_not_reported():
    drafter, sequence = TokenDrafter(Recorder()), new_sequence()
    drafter.start(sequence)
    run_step(drafter, plan_of(sequence), [])
    drafter.propose(plan_of(sequence))
    assert drafter.inner.calls[1:] == [("draft", [0], [], [0], [4], None)]


def test_a_sequence_that_could_not_start_gets_no_drafts():
    drafter = TokenDrafter(Recorder(refused=[1]))
    sequences = [new_sequence(index) for index in range(3)]
    for sequence in sequences[:1] + sequences[2:]:
        drafter.start(sequence)
    with pytest.raises(ValueError, match="no room"):
        drafter.start(sequences[1])
    plan = plan_of(*sequences)
    assert drafter.propose(plan).batch.offsets.tolist() == [0, 1, 1, 2]
    run_step(drafter, plan, [8])
    drafter.finish(sequences[1], learn=True)
    assert drafter.propose(plan_of(sequences[1])).batch.offsets.tolist() == [0, 0]
    assert {call[0] for call in drafter.inner.calls} == {"start", "draft"}


def test_both_drafter_interfaces_are_accepted():
    inner = Recorder()
    drafter = adapt(inner)
    assert isinstance(drafter, TokenDrafter)
    assert adapt(drafter) is drafter
    assert innermost(drafter) is inner is innermost(inner)


@pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])
def test_hints_are_drafted_for_their_request_alone(make):
    hints = np.array([1, 2, 6, 7, 8, 9, 10, 11], np.uint32)
    drafter = TokenDrafter(make())
    hinted, other = (new_sequence(number, hints=given) for number, given in enumerate((hints, None)))
    for sequence in (hinted, other):
        drafter.start(sequence)
    drafts = drafter.propose(plan_of(hinted, other)).batch
    assert drafts.tokens_of(0).tolist()[:2] == [8, 9]
    assert len(drafts.tokens_of(1)) == 0
    drafter.finish(hinted, learn=True)
    assert len(drafter.propose(plan_of(other)).batch.tokens) == 0
    drafter.close()


def test_drafters_without_hints_get_none():
    recorder = Recorder()
    hints = np.array([1, 2], np.uint32)
    TokenDrafter(recorder).start(new_sequence(hints=hints))
    assert recorder.calls == [("start", 0, PROMPT.tolist())]


def test_a_sequence_ends_even_if_reporting_its_steps_fails():
    drafter, sequence = TokenDrafter(Recorder()), new_sequence()
    drafter.start(sequence)
    for token in (8, 9):
        run_step(drafter, plan_of(sequence), [token])
    drafter.inner.draft = lambda _progress: 1 / 0
    with pytest.raises(ZeroDivisionError):
        drafter.finish(sequence, learn=True)
    assert drafter.inner.calls[-1] == ("finish", 0, [], 0, True)
    assert (drafter._reported == NOT_STARTED).all(axis=0)[0]


@pytest.mark.parametrize("wrap", [lambda drafter: drafter, lambda drafter: AdapterDrafters(drafter, None)])
@pytest.mark.parametrize("learn", [False, True])
def test_running_requests_that_may_not_be_learned_are_not_drafted_for_others(wrap, learn):
    drafter = TokenDrafter(wrap(SuffixDrafter()))
    running, other = (new_sequence(number, learn=may_learn) for number, may_learn in enumerate((learn, True)))
    for sequence in (running, other):
        drafter.start(sequence)
    drafter.propose(plan_of(running, other))
    for token in range(21, 30):
        run_step(drafter, plan_of(running), [token])
        drafter.propose(plan_of(running))
    drafter.inner.corpus.refresh()
    run_step(drafter, plan_of(other), [21, 22, 23])
    assert (24 in drafter.propose(plan_of(other)).batch.tokens) == learn
    drafter.close()
