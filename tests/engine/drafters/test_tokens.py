"""Calls that `TokenDrafter` makes to a drafter of tokens, whatever happens between two drafts."""

from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.drafters.by_adapter import AdapterDrafters
from engine.drafters.tokens import NOT_STARTED, TokenDrafter, adapt
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.result import StepResult
from engine.scheduling.sequence import Sequence
from engine.scheduling.table import RequestTable
from ssd.baselines.ngram import NgramDrafter
from ssd.drafter import SuffixDrafter
from ssd.errors import UserError
from ssd.types import DraftBatch, Drafter, Path
from tests.engine.steps import plan_of_rows

PROMPT = np.array([5, 6, 7], np.uint32)
TABLE = RequestTable(300, 1)
"""Rows of all sequences of these tests."""


class Recorder(Drafter):
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


def new_sequence(sequence_id=0, table=None, **settings):
    sequence = Sequence(sequence_id, Request(PROMPT, SamplingParams(max_tokens=300), **settings), 303)
    (table or TABLE).add(sequence)
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


class NaiveAdapter:
    """The calls that a drafter of tokens gets, kept as lists."""

    def __init__(self):
        self.calls, self.known = [], {}
        """Number of reported tokens, steps since then, and draft tokens verified in the first of them, by sequence."""

    def start(self, sequence):
        self.calls.append(("start", sequence.sequence_id, PROMPT.tolist()))
        self.known[sequence.sequence_id] = [len(PROMPT), 0, 0]

    def propose(self, sequences, room):
        """Return the ids of the sequences that are drafted for."""
        drafted = [each for each in sequences if each.sequence_id in self.known and each.request.max_draft != 0]
        known = [self.known[each.sequence_id] for each in drafted]
        if drafted:
            rest = [each.tokens[at:].tolist() for each, (at, *_) in zip(drafted, known, strict=True)]
            steps = [steps for _, steps, _ in known]
            ids = [each.sequence_id for each in drafted]
            self.calls.append(("draft", ids, list(chain(*rest)), [verified for *_, verified in known],
                               [room] * len(ids), steps if max(steps) > 1 else None))  # fmt: skip
        self.known |= {each.sequence_id: [len(each.tokens), 0, 0] for each in drafted}
        return [each.sequence_id for each in drafted]

    def observe(self, sequences, committed, verified):
        for sequence in sequences if committed else ():
            if (known := self.known.get(sequence.sequence_id)) is not None:
                known[1:] = known[1] + 1, known[2] if known[1] else verified

    def finish(self, sequence, learn):
        number = sequence.sequence_id
        if number in self.known:
            at, steps, verified = self.known.pop(number)
            rest = sequence.tokens[at:].tolist()
            if steps > 1:
                self.calls.append(("draft", [number], rest, [verified], [0], [steps]))
                rest, verified = [], 0
            self.calls.append(("finish", number, rest, verified, learn))


class Adapting(RuleBasedStateMachine):
    """Steps of sequences in any order, some of which cannot start, want no drafts, or only compute prompts."""

    def __init__(self):
        super().__init__()
        self.table, self.naive = RequestTable(60, 1), NaiveAdapter()
        self.drafter, self.running, self.count = TokenDrafter(Recorder(refused=range(0, 99, 5))), [], 0

    @rule(max_draft=st.sampled_from([None, None, 0, 3]))
    def start(self, max_draft):
        if self.count < 50:
            # The drafter takes no hints, so it is given none.
            self.running.append(new_sequence(self.count, self.table, max_draft=max_draft, hints=PROMPT))
            self.count += 1
            if self.running[-1].sequence_id % 5:
                self.drafter.start(self.running[-1])
                self.naive.start(self.running[-1])
            else:
                with pytest.raises(ValueError, match="no room"):
                    self.drafter.start(self.running[-1])

    @rule(data=st.data(), calls=st.booleans(), committed=st.integers(0, 3), room=st.integers(0, 5))
    def step(self, data, calls, committed, room):
        chosen = [each for each in self.running if data.draw(st.booleans())]
        plan = plan_of_rows(self.table, chosen, room)
        if calls:
            drafts = self.drafter.propose(plan).batch
            drafted = self.naive.propose(chosen, room)
            assert np.diff(drafts.offsets).tolist() == [int(each.sequence_id in drafted) for each in chosen]
        verified = data.draw(st.integers(0, 3)) if committed else 0
        run_step(self.drafter, plan, range(20, 20 + committed), verified)
        self.naive.observe(chosen, committed, verified)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), learn=st.booleans())
    def finish(self, data, learn):
        sequence = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.drafter.finish(sequence, learn)
        self.naive.finish(sequence, learn)
        self.table.remove(sequence)

    @invariant()
    def calls_are_those_of_the_twin(self):
        assert self.drafter.inner.calls == self.naive.calls


TestAdapting = Adapting.TestCase


def test_both_drafter_interfaces_are_accepted():
    inner = Recorder()
    drafter = adapt(inner)
    assert isinstance(drafter, TokenDrafter)
    assert adapt(drafter) is drafter
    assert (drafter.inner, drafter.origin) == (inner, Recorder)
    with pytest.raises(UserError, match=r"SimpleNamespace must inherit from ssd\.Drafter"):
        adapt(SimpleNamespace(start=None, draft=None))


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
