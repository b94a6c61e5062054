"""Totals of steps against the same, token by token."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.api.messages import STEP_TOKENS
from engine.api.tally import Tally
from engine.engine import StepReport
from engine.scheduling.plan import SequencePlan, SequenceResult
from engine.scheduling.request import Completion, FinishReason, Request
from ssd.types import Source
from tests.engine.api.fake_engine import FakeEngine


@st.composite
def results(draw):
    # A remote drafter may say anything of its sources.
    sources = np.array(draw(st.lists(st.sampled_from([*Source, 77]), max_size=2)), np.uint8)
    kept = np.flatnonzero(draw(st.lists(st.booleans(), min_size=len(sources), max_size=len(sources))))
    tokens = np.zeros(len(kept) + draw(st.integers(0, 1)), np.uint32)
    sequence = SimpleNamespace(sequence_id=draw(st.integers(0, 3)))
    plan = SequencePlan(sequence, 9, 1, True, draft=np.zeros(len(sources), np.uint32), sources=sources)
    return SequenceResult(plan, tokens, kept)


@given(st.lists(st.lists(results(), max_size=5, unique_by=lambda result: result.sequence_id), max_size=6))
def test_totals(steps):
    tally = Tally(FakeEngine())
    for sequence_id in range(4):
        tally.begun(sequence_id, Request(np.zeros(10, np.uint32)))
    drafted, accepted, sizes, seen = Counter(), Counter(), [], set()
    for step in steps:
        tally.stepped(StepReport(step))
        size = 0
        for result in step:
            size += len(result.tokens) + (10 if result.sequence_id not in seen else 0)
            seen.add(result.sequence_id)
            drafted.update(result.sources.tolist())
            accepted.update(result.sources[node] for node in result.kept)
        sizes += [size] if size else []
    figures = tally.figures()
    assert figures.drafted_from == {source.name.lower(): drafted[source] for source in Source}
    assert figures.accepted_from == {source.name.lower(): accepted[source] for source in Source}
    assert (figures.drafted, figures.accepted) == (drafted.total(), accepted.total())
    assert figures.step_tokens_sum == sum(sizes)
    for index, bound in enumerate(STEP_TOKENS):
        assert sum(figures.step_tokens[: index + 1]) == sum(size <= bound for size in sizes)
    assert sum(figures.step_tokens) == len(sizes)


def test_what_a_drafter_was_given_to_remember():
    engine = FakeEngine()
    engine.drafter = SimpleNamespace()  # one without a corpus of its own
    tally = Tally(engine)
    whole = Completion(np.zeros(5, np.uint32), FinishReason.STOP, 1, 0, 0, cached_tokens=2)
    cancelled = Completion(np.zeros(5, np.uint32), FinishReason.ABORT, 1, 0, 0, cached_tokens=2)
    prompt = np.zeros(3, np.uint32)
    for learn, completion in ((True, whole), (False, whole), (True, cancelled)):
        tally.begun(0, Request(prompt, learn=learn))
        tally.ended(0, Request(prompt, learn=learn), completion)
    figures = tally.figures()
    assert (figures.learned_tokens, figures.cached_tokens, figures.corpus) == (5, 6, None)
