"""`AdapterDrafters` gives each drafter its own sequences, and returns drafts in the order of the batch."""

from itertools import pairwise
from threading import Event

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.drafters.by_adapter import AdapterDrafters
from ssd.corpus.rollout import Rollout
from ssd.types import DraftBatch, Drafter, Path, Progress, offsets_of

LABELS = {None: 100, "a": 101, "b": 102}


class Labeled(Drafter):
    """Drafts its label after the committed tokens of each sequence; adds its calls to a list."""

    def __init__(self, label, calls):
        self.label, self.calls = label, calls

    def start(self, sequence_id, prompt, **options):
        self.calls.append(("start", self.label, sequence_id, options))

    def draft(self, progress):
        given = progress.sequence_ids.tolist(), progress.max_draft.tolist(), progress.steps.tolist()
        self.calls.append(("draft", self.label, *given))
        committed = [progress.tokens[slice(*bounds)] for bounds in pairwise(progress.offsets.tolist())]
        paths = [np.append(tokens, self.label).astype(np.uint32) for tokens in committed]
        return DraftBatch.from_paths([Path(path, np.ones(len(path), np.float32)) for path in paths])

    draft_after = draft

    def begin_draft(self, progress):
        self.calls.append("sent")
        return lambda: self.draft(progress)

    def finish(self, sequence_id, tokens, *, verified=0, learn=True):
        self.calls.append(("finish", self.label, sequence_id, tokens.tolist(), verified, learn))

    def close(self):
        self.calls.append(("close", self.label))


@given(st.lists(st.tuples(st.sampled_from([None, "a", "b"]), st.integers(0, 3)), min_size=1, max_size=6))
@pytest.mark.parametrize("method", ["draft", "draft_after"])
def test_each_drafter_gets_its_sequences_and_drafts_are_in_the_order_of_the_batch(method, batch):
    """Remote drafters get their parts before the first answer is awaited."""
    calls, expected, count = [], [], len(batch)
    joint = AdapterDrafters(Labeled(100, calls), lambda name: Labeled(LABELS[name], calls))
    hints, rollout = np.array([7], np.uint32), Rollout("problem", 3)
    options = {"hints": hints, "request_id": "b", "learn": False, "rollout": rollout, "seed": 5}
    for number, (adapter, _) in enumerate(batch):
        joint.start(number, np.array([1], np.uint32), adapter=adapter, **options)
        expected.append(("start", LABELS[adapter], number, options))
    lengths = np.array([length for _, length in batch])
    drafts = getattr(joint, method)(
        Progress(
            sequence_ids=np.arange(count, dtype=np.uint64),
            tokens=np.repeat(np.arange(count, dtype=np.uint32), lengths),
            offsets=offsets_of(lengths),
            verified=np.zeros(count, np.uint32),
            max_draft=np.arange(10, 10 + count, dtype=np.uint32),
            steps=np.arange(20, 20 + count, dtype=np.uint32),
        )
    )
    for number, (adapter, length) in enumerate(batch):
        assert drafts.tokens_of(number).tolist() == [number] * length + [LABELS[adapter]]
    assert len(drafts) == count
    distinct = dict.fromkeys(adapter for adapter, _ in batch)
    expected += ["sent"] * len(distinct) * (method == "draft")
    for adapter in distinct:
        own = [number for number, (each, _) in enumerate(batch) if each == adapter]
        expected.append(("draft", LABELS[adapter], own, [10 + each for each in own], [20 + each for each in own]))
    joint.finish(0, np.array([5], np.uint32), verified=1, learn=False)
    assert calls == [*expected, ("finish", LABELS[batch[0][0]], 0, [5], 1, False)]
    calls.clear()
    joint.close()
    assert set(calls) == {("close", LABELS[adapter]) for adapter in (None, *distinct)}


@pytest.mark.parametrize(("ended", "replaced"), [("b", "b"), ("abc", "b"), ("ab", "b"), ("c", None)])
def test_the_least_recently_used_drafter_without_sequences_is_replaced(ended, replaced):
    made, closed = {}, Event()

    class Closing(Labeled):
        def close(self):
            super().close()
            closed.set()

    def make(name):
        made[name] = Closing(name, [])
        return made[name]

    joint = AdapterDrafters(Labeled(0, []), make, most=2)
    for sequence_id, name in enumerate("abac"):
        joint.start(sequence_id, np.array([1], np.uint32), adapter=name)
        if name in ended:
            joint.finish(sequence_id, np.array([], np.uint32))
    assert list(made) == ["a", "b", "c"]
    assert replaced is None or closed.wait(60)
    is_closed = [name for name, drafter in made.items() if ("close", name) in drafter.calls]
    assert is_closed == [replaced] * bool(replaced)
    joint.close()
    assert all(("close", name) in drafter.calls for name, drafter in made.items())
