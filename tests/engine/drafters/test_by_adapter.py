"""`AdapterDrafters` gives each drafter its own sequences, and returns drafts in the order of the batch."""

from itertools import pairwise
from threading import Event

import numpy as np
import pytest

from engine.drafters.by_adapter import AdapterDrafters
from ssd.corpus.rollout import Rollout
from ssd.types import DraftBatch, Drafter, Path, Progress, offsets_of


class Labeled(Drafter):
    """Drafts its label, once per committed token of a sequence, and records its calls."""

    def __init__(self, label):
        self.label = label
        self.calls = []

    def start(self, sequence_id, prompt, *, hints=None, request_id=None, learn=True, rollout=None, seed=None):
        self.calls.append(("start", sequence_id, hints, request_id, learn, rollout, seed))

    def draft(self, progress):
        self.calls.append(("draft", progress.sequence_ids.tolist(), progress.max_draft.tolist(), progress.steps))
        committed = [progress.tokens[slice(*bounds)] for bounds in pairwise(progress.offsets.tolist())]
        return DraftBatch.from_paths(
            [Path(np.append(tokens, self.label).astype(np.uint32), np.ones(len(tokens) + 1, np.float32))
             for tokens in committed]
        )  # fmt: skip

    def finish(self, sequence_id, tokens, *, verified=0, learn=True):
        self.calls.append(("finish", sequence_id, tokens.tolist(), verified, learn))

    def close(self):
        self.calls.append(("close",))


class Remote(Labeled):
    """Sends a request before it waits for drafts."""

    def begin_draft(self, progress):
        self.calls.append("sent")

        def wait():
            self.calls.append("waited")
            return super(Remote, self).draft(progress)

        return wait


class LabeledAfter(Labeled):
    """Can also draft after tokens that are not committed."""

    draft_after = Labeled.draft


def progress_of(lengths, steps=None):
    """Sequences 0, 1, ... with committed tokens that are the sequence's number."""
    count = len(lengths)
    return Progress(
        sequence_ids=np.arange(count, dtype=np.uint64),
        tokens=np.repeat(np.arange(count, dtype=np.uint32), lengths),
        offsets=offsets_of(np.array(lengths)),
        verified=np.zeros(count, np.uint32),
        max_draft=np.arange(10, 10 + count, dtype=np.uint32),
        steps=steps,
    )


@pytest.fixture
def drafters():
    return [LabeledAfter(label) for label in (100, 101, 102)]


@pytest.fixture
def joint(drafters):
    return AdapterDrafters(drafters[0], {"a": drafters[1], "b": drafters[2]}.get)


def start(joint, adapters, **options):
    for sequence_id, adapter in enumerate(adapters):
        joint.start(sequence_id, np.array([1], np.uint32), adapter=adapter, **options)


@pytest.mark.parametrize("method", ["draft", "draft_after"])
@pytest.mark.parametrize("adapters", [["b", None, "a", "b", None], ["a", "a"], [None, "a"]])
def test_drafts_are_in_the_order_of_the_batch(joint, adapters, method):
    start(joint, adapters)
    lengths = np.arange(len(adapters))[::-1]
    batch = getattr(joint, method)(progress_of(lengths))
    label = {None: 100, "a": 101, "b": 102}
    for index, adapter in enumerate(adapters):
        assert batch.tokens_of(index).tolist() == [index] * lengths[index] + [label[adapter]]
        assert batch.parents_of(index).tolist() == list(range(-1, lengths[index]))
    assert len(batch) == len(adapters)


def test_each_drafter_sees_its_own_sequences(joint, drafters):
    start(joint, ["a", None, "a"])
    joint.draft(progress_of([1, 1, 1], steps=np.array([1, 2, 3], np.uint32)))
    joint.finish(2, np.array([5], np.uint32), verified=1, learn=False)
    joint.close()
    assert drafters[0].calls == [("start", 1, None, None, True, None, None), ("draft", [1], [11], [2]), ("close",)]
    own = drafters[1].calls
    assert own[:2] == [("start", 0, None, None, True, None, None), ("start", 2, None, None, True, None, None)]
    assert own[2][:3] == ("draft", [0, 2], [10, 12])
    assert own[2][3].tolist() == [1, 3]
    assert own[3:] == [("finish", 2, [5], 1, False), ("close",)]
    assert not drafters[2].calls  # it was never made


def test_drafters_get_the_options_of_a_request(joint, drafters):
    hints, rollout = np.array([7], np.uint32), Rollout("problem", 3)
    start(joint, [None, "a"], hints=hints, request_id="b", learn=False, rollout=rollout, seed=5)
    for sequence_id, drafter in enumerate(drafters[:2]):
        assert drafter.calls == [("start", sequence_id, hints, "b", False, rollout, 5)]


def test_all_requests_are_sent_before_the_first_wait():
    calls = []

    def make(label):
        drafter = Remote(label)
        drafter.calls = calls
        return drafter

    joint = AdapterDrafters(make(100), lambda name: make({"a": 101, "b": 102}[name]))
    start(joint, ["a", None, "b"])
    calls.clear()
    batch = joint.draft(progress_of([1, 1, 1]))
    assert [call for call in calls if isinstance(call, str)] == ["sent"] * 3 + ["waited"] * 3
    assert [batch.tokens_of(index).tolist() for index in range(3)] == [[0, 101], [1, 100], [2, 102]]


@pytest.mark.parametrize(("ended", "replaced"), [("b", "b"), ("abc", "b"), ("ab", "b"), ("c", None)])
def test_the_least_recently_used_drafter_without_sequences_is_replaced(ended, replaced):
    made, closed = {}, Event()

    class Closing(Labeled):
        def close(self):
            super().close()
            closed.set()

    def make(name):
        made[name] = Closing(name)
        return made[name]

    joint = AdapterDrafters(Labeled(0), make, most=2)
    for sequence_id, name in enumerate("abac"):
        joint.start(sequence_id, np.array([1], np.uint32), adapter=name)
        if name in ended:
            joint.finish(sequence_id, np.array([], np.uint32))
    assert list(made) == ["a", "b", "c"]
    assert replaced is None or closed.wait(60)
    assert [name for name, drafter in made.items() if ("close",) in drafter.calls] == [replaced] * bool(replaced)
    joint.close()
    assert all(("close",) in drafter.calls for drafter in made.values())
