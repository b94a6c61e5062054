"""The embedded and the remote drafter, over both transports: equal drafts and equal errors for equal calls."""

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest

from drafter_service.client import DrafterClient
from ssd import DrafterConfig, SuffixDrafter
from ssd.types import PROPOSE_ID
from tests.replay import accepted_path, progress_of, replay_one
from tests.servers import served
from tests.ssd.test_refusals import begin, outcome, refuse_all
from tests.strategies import array
from tests.waiting import TIMEOUT_S, eventually

numbers = itertools.count()


@pytest.fixture(scope="module")
def addresses():
    """Yield the addresses of one service, by the transport that a client uses there."""
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        path = Path(folder)
        with served("--listen", f"unix:{path}/drafter.sock", "--capacity", "100k"):
            # There is no step socket with this name.
            (path / "grpc.sock").symlink_to(path / "drafter.sock")
            yield {"socket": f"unix:{path}/drafter.sock", "grpc": f"unix:{path}/grpc.sock"}


@pytest.fixture(params=["embedded", "socket", "grpc"])
def drafter(request):
    if request.param == "embedded":
        with SuffixDrafter(DrafterConfig(capacity=100_000)) as embedded:
            yield embedded
        return
    address = request.getfixturevalue("addresses")[request.param]
    with DrafterClient(address, deadline_s=TIMEOUT_S, namespace=f"test-{next(numbers)}") as client:
        assert client.transport == request.param
        yield client


def test_drafts_from_the_request_itself(drafter):
    drafter.start(1, array([1, 2, 3, 1, 2]))
    drafter.start(2, array([9]))
    drafts = drafter.draft(progress_of({1: [], 2: []}, limit=2))
    assert drafts.tokens.tolist() == [3, 1]
    assert drafts.offsets.tolist() == [0, 2, 2]
    drafts = drafter.draft(progress_of({2: [4, 9], 1: [3]}, limit=1))
    assert [drafts.tokens_of(index).tolist() for index in (0, 1)] == [[4], [1]]


def test_drafts_and_their_probabilities_are_equal(drafter):
    """The requests are private, since the time at which one becomes visible to another differs."""
    rng = np.random.default_rng(0)
    texts = {number: (1000 * number + rng.integers(0, 6, 120)).astype(np.uint32) for number in range(3)}
    with SuffixDrafter(DrafterConfig(capacity=100_000)) as reference:
        for one in (drafter, reference):
            for number, text in texts.items():
                one.start(number, text[:20], learn=False)
        committed, done = dict.fromkeys(texts, ()), dict.fromkeys(texts, 20)
        verified = np.zeros(3, np.uint32)
        drafted = 0
        for step in range(20):
            progress = progress_of(committed, limit=6, cost=(None, 0.001, 0.1)[step % 3])
            progress.verified[:] = verified
            drafts, expected = drafter.draft(progress), reference.draft(progress)
            for name in ("tokens", "parents", "accept_prob", "source", "offsets"):
                assert getattr(drafts, name).tolist() == getattr(expected, name).tolist(), name
            drafted += len(drafts.tokens)
            for number, text in texts.items():
                accepted = len(accepted_path(drafts, number, text[done[number] :]))
                committed[number] = text[done[number] : done[number] + accepted + 1]
                done[number] += len(committed[number])
                verified[number] = len(drafts.tokens_of(number))
        assert drafted > 60


def test_hints_are_drafted_but_never_learned(drafter):
    drafter.start(1, array([9, 21, 22]), hints=array([20, 21, 22, 23, 24]))
    assert drafter.draft(progress_of({1: []}, limit=3)).tokens.tolist() == [23, 24, 9]
    drafter.finish(1, array([30, 31]))
    drafter.start(2, array([22, 30]))
    eventually(lambda: drafter.draft(progress_of({2: []}, limit=1)).tokens.tolist() == [31])
    drafter.start(3, array([20, 21]))
    assert drafter.draft(progress_of({3: []}, limit=1)).tokens.tolist() == [22]
    drafter.start(4, array([8, 23]))
    assert drafter.draft(progress_of({4: []}, limit=1)).tokens.tolist() == []


def test_steps_of_a_text_are_equal(drafter):
    text = np.random.default_rng(4).integers(0, 6, 200).astype(np.uint32)
    with SuffixDrafter(DrafterConfig(capacity=100_000)) as reference:
        assert replay_one(drafter, 5, text[:20], text[20:]) == replay_one(reference, 5, text[:20], text[20:])


def test_a_refused_call_has_no_effect(drafter):
    with SuffixDrafter(DrafterConfig(capacity=100_000)) as reference:
        for one in (drafter, reference):
            begin(one)
        refuse_all(drafter)
        assert len(drafter.draft(progress_of({}, limit=1))) == 0
        assert outcome(drafter) == outcome(reference)
    drafter.start(PROPOSE_ID - 1, array([1, 2, 1]))
    assert drafter.draft(progress_of({PROPOSE_ID - 1: []}, limit=1)).tokens.tolist() == [2]


def test_propose_drafts_after_a_context(drafter):
    context = [1, 2, 3, 4, 1, 2]
    assert drafter.propose(context, 2).tokens.tolist() == [3, 4]
    assert drafter.propose(array([*context, 3]), 2).tokens.tolist() == [4, 1]
    assert drafter.propose([7, 8, 7], 1).tokens.tolist() == [8]
    assert drafter.propose([], 4).tokens.tolist() == []
    assert len(drafter.propose([1, 2, 1]).tokens) > 0


def test_forgotten_requests_are_not_drafted(drafter):
    for number, name in ((1, "secret"), (2, "other"), (3, "secret")):
        drafter.start(number, array([10 * number]), request_id=name)
    drafter.draft(progress_of({3: array([31, 32])}, limit=1))
    drafter.finish(1, array([11, 12, 13]))
    drafter.finish(2, array([21, 22, 23]))
    drafter.forget("secret")
    if isinstance(drafter, SuffixDrafter):  # The service has refreshed its corpus before it answers.
        drafter.corpus.refresh()
    drafter.finish(3, array([33]))
    drafter.start(4, array([20, 21]))
    eventually(lambda: drafter.draft(progress_of({4: []}, limit=2)).tokens.tolist() == [22, 23])
    for number, context in ((5, [10, 11]), (6, [30, 31])):
        drafter.start(number, array(context))
        assert not len(drafter.draft(progress_of({number: []}, limit=2)).tokens)
