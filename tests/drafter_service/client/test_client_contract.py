"""The client without a connection: what services may send."""

import numpy as np
import pytest

from drafter_service.client.messages import RefusedError
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import WireError, drafts_message
from ssd.types import DraftBatch, Path
from tests.drafter_service.core_wire import Wire, connected, start
from tests.drafter_service.fake_server import FakeService
from tests.replay import progress_of
from tests.strategies import array


def answer_of(*drafts: tuple[list[int], list[int]], odds: float = 0.5) -> DraftBatch:
    """Drafts of (tokens, parents) each."""
    batch = DraftBatch.from_paths([Path(array(tokens), np.full(len(tokens), odds, np.float32)) for tokens, _ in drafts])
    batch.parents[:] = [parent for _, parents in drafts for parent in parents]
    return batch


PATH_3 = [-1, 0, 1]
USELESS = {
    "longer than asked for": answer_of(([1, 2, 3], PATH_3), (list(range(9)), list(range(-1, 8)))),
    "a tree that is longer than the limit": answer_of(([1, 2, 3], PATH_3), ([1, 2, 3, 4], [-1, 0, 0, 0])),
    "outside the vocabulary": answer_of(([1, 2, 3], PATH_3), ([1, 100], [-1, 0])),
    "a parent that comes later": answer_of(([1, 2, 3], PATH_3), ([1, 2], [1, 0])),
    "a parent of its own": answer_of(([1, 2, 3], PATH_3), ([1, 2], [-1, 1])),
    "a parent before the first": answer_of(([1, 2, 3], PATH_3), ([1, 2], [-2, 0])),
}


@pytest.mark.parametrize("drafts", USELESS.values(), ids=USELESS.keys())
def test_a_draft_that_is_none_is_dropped_and_the_others_are_used(drafts):
    wire = connected(model=pb.Model(vocabulary_size=100))
    start(wire.core, 1, [5])
    start(wire.core, 2, [6])
    wire.settle()
    turn = wire.core.draft(progress_of({1: [], 2: []}, limit=3))
    wire.flush()
    wire.serve()
    wire.downward[0].drafts.CopyFrom(drafts_message(drafts))
    wire.deliver()
    got = wire.core.settle(turn)
    assert [got.tokens_of(index).tolist() for index in (0, 1)] == [[1, 2, 3], []]
    assert wire.core.counters.malformed == 1
    # The service takes the counts that follow.
    wire.service.sequences[wire.client_id][1].drafted = [1, 2, 3]
    wire.draft(progress_of({1: [1, 9], 2: [7]}, limit=3, verified=0))
    assert sorted(wire.service.texts()) == [[5, 1, 9], [6, 7]]


@pytest.mark.parametrize("odds", [float("nan"), -0.1, 1.1])
def test_odds_that_are_none_spoil_a_draft(odds):
    wire = connected()
    start(wire.core, 1, [5])
    wire.settle()
    turn = wire.core.draft(progress_of({1: []}, limit=3))
    wire.flush()
    wire.serve()
    wire.downward[0].drafts.CopyFrom(drafts_message(answer_of(([1], [-1]), odds=odds)))
    wire.deliver()
    assert not len(wire.core.settle(turn).tokens)
    assert wire.core.counters.malformed == 1


@pytest.mark.parametrize(
    ("field", "data"),
    [
        ("offsets", b"123"),
        ("offsets", array([0, 2]).tobytes()),
        ("offsets", array([1, 2, 2]).tobytes()),
        ("offsets", array([0, 1, 1]).tobytes()),
        ("offsets", array([0, 3, 2]).tobytes()),
        ("tokens", array([0xFFFF_FFFF, 1]).tobytes()),
        ("tokens", b"123"),
        ("parents", array([0]).tobytes()),
        ("odds", bytes(9)),
        ("source", bytes(3)),
    ],
)
def test_an_answer_whose_arrays_do_not_fit_is_no_answer(field, data):
    wire = connected(lambda _text, _limit: [1])
    start(wire.core, 1, [5])
    start(wire.core, 2, [5])
    wire.settle()
    turn = wire.core.draft(progress_of({1: [], 2: []}, limit=3))
    wire.flush()
    wire.serve()
    setattr(wire.downward[0].drafts, field, data)
    wire.deliver()
    assert not len(wire.core.settle(turn).tokens)
    assert wire.core.counters.malformed == 2
    wire.draft(progress_of({1: [1], 2: [1]}, limit=3))
    assert wire.service.texts() == [[5, 1], [5, 1]]


def test_tokens_that_belong_to_nobody_make_an_answer_none():
    wire = connected(lambda _text, _limit: [1, 2])
    start(wire.core, 1, [5])
    wire.settle()
    turn = wire.core.draft(progress_of({1: []}, limit=3))
    wire.flush()
    wire.serve()
    wire.downward[0].drafts.offsets = array([0, 1]).tobytes()
    wire.deliver()
    assert not len(wire.core.settle(turn).tokens)
    assert wire.core.counters.malformed == 1


def response_after(wire: Wire, **changes) -> pb.DraftResponse:
    start(wire.core, 1, [5])
    wire.flush()
    wire.serve()
    response = wire.downward.pop()
    for name, value in changes.items():
        if name == "error":
            response.error.CopyFrom(value)
        else:
            setattr(response, name, value)
    return response


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step": 99}, "answered step 99 out of order"),
        ({"error": pb.Error(code=3, message="no sense")}, "no sense"),
        ({"lost_ids": b"123"}, "lost_ids has 3 bytes"),
    ],
)
def test_a_service_that_breaks_the_contract_meets_a_new_client(changes, reason):
    wire = connected()
    response = response_after(wire, **changes)
    with pytest.raises(WireError, match=reason):
        wire.core.receive(response)
    before = wire.client_id
    wire.core.hang_up(is_doubtful=True)
    wire.connect()
    assert wire.client_id != before
    wire.settle()
    wire.draft(progress_of({1: []}, limit=1))
    assert [known.text for known in wire.service.sequences[wire.client_id].values()] == [[5]]


def test_a_second_answer_to_a_message_breaks_the_contract():
    wire = connected()
    response = response_after(wire)
    wire.core.receive(response)
    with pytest.raises(WireError, match="out of order"):
        wire.core.receive(response)


@pytest.mark.parametrize(
    ("response", "error", "reason"),
    [
        (pb.DraftResponse(step=1), RefusedError, "protocol 2"),
        (pb.DraftResponse(step=1, welcome=pb.Welcome(protocol=3)), RefusedError, "protocol 2"),
        (pb.DraftResponse(step=1, error=pb.Error(code=3, message="who?")), RefusedError, r"who\?"),
        (pb.DraftResponse(step=1, error=pb.Error(code=8, message="full")), WireError, "full"),
        (
            pb.DraftResponse(step=1, welcome=pb.Welcome(protocol=2, resumed_ids=bytes(8))),
            WireError,
            "resumed_lengths has 0 elements, not 1",
        ),
    ],
)
def test_what_is_no_welcome(response, error, reason):
    wire = Wire(FakeService())
    wire.connect()
    with pytest.raises(error, match=reason):
        wire.core.receive(response)
