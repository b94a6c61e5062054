"""Responses that violate the contract."""

import numpy as np
import pytest

from drafter_service.client.connection import RefusedError
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import WireError, drafts_message
from ssd.types import DraftBatch, Path
from tests.drafter_service.client_wire import Wire, connected, start
from tests.drafter_service.fake_server import FakeService
from tests.replay import progress_of
from tests.strategies import array


def drafts_of(*drafts: tuple[list[int], list[int]]) -> DraftBatch:
    """Return drafts from pairs of (tokens, parents)."""
    batch = DraftBatch.from_paths([Path(array(tokens), np.full(len(tokens), 0.5, np.float32)) for tokens, _ in drafts])
    batch.parents[:] = [parent for _, parents in drafts for parent in parents]
    return batch


PATH_3 = [-1, 0, 1]


def with_prob(accept_prob: float) -> DraftBatch:
    """Return drafts of which the second has a token with this probability."""
    batch = drafts_of(([1, 2, 3], PATH_3), ([1], [-1]))
    batch.accept_prob[-1] = accept_prob
    return batch


MALFORMED = {
    "longer than the limit": drafts_of(([1, 2, 3], PATH_3), ([1, 2, 3, 4], [-1, 0, 1, 2])),
    "a tree longer than the limit": drafts_of(([1, 2, 3], PATH_3), ([1, 2, 3, 4], [-1, 0, 0, 0])),
    "outside the vocabulary": drafts_of(([1, 2, 3], PATH_3), ([1, 100], [-1, 0])),
    "a reserved token id": drafts_of(([1, 2, 3], PATH_3), ([1, 0xFFFF_FFFF], [-1, 0])),
    "a parent after its child": drafts_of(([1, 2, 3], PATH_3), ([1, 2], [1, 0])),
    "its own parent": drafts_of(([1, 2, 3], PATH_3), ([1, 2], [-1, 1])),
    "a parent before the root": drafts_of(([1, 2, 3], PATH_3), ([1, 2], [-2, 0])),
    **{f"a probability of {prob}": with_prob(prob) for prob in (float("nan"), -0.1, 1.1)},
}


def answered_with(wire: Wire, drafts: DraftBatch, numbers, limit=3) -> DraftBatch:
    """Return the drafts that the engine receives if the service answers with `drafts`."""
    turn = wire.client.draft(progress_of({number: [] for number in numbers}, limit=limit))
    wire.serve()
    wire.responses[0].drafts.CopyFrom(drafts_message(drafts))
    wire.deliver()
    return wire.client.settle(turn)


@pytest.mark.parametrize("drafts", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_draft_is_dropped_and_the_others_are_used(drafts):
    wire = connected(model=pb.Model(vocab_size=100))
    start(wire.client, 1, [5])
    start(wire.client, 2, [6])
    wire.settle()
    got = answered_with(wire, drafts, (1, 2))
    assert [got.tokens_of(index).tolist() for index in (0, 1)] == [[1, 2, 3], []]
    assert wire.client.counters.malformed == 1
    # The service accepts the counts that follow.
    wire.draft(progress_of({1: [1, 9], 2: [7]}, limit=3, verified=0))
    assert sorted(wire.service.texts()) == [[5, 1, 9], [6, 7]]


@pytest.mark.parametrize(
    ("field", "data"),
    [
        ("offsets", b"123"),
        ("offsets", array([0, 2]).tobytes()),
        ("offsets", array([1, 2, 2]).tobytes()),
        ("offsets", array([0, 1, 1]).tobytes()),
        ("offsets", array([0, 3, 2]).tobytes()),
        ("tokens", b"123"),
        ("parents", array([0]).tobytes()),
        ("accept_prob", bytes(9)),
        ("source", bytes(3)),
    ],
)
def test_drafts_whose_arrays_do_not_fit_together_are_dropped(field, data):
    wire = connected(lambda _text, _limit: [1])
    start(wire.client, 1, [5])
    start(wire.client, 2, [5])
    wire.settle()
    turn = wire.client.draft(progress_of({1: [], 2: []}, limit=3))
    wire.serve()
    setattr(wire.responses[0].drafts, field, data)
    wire.deliver()
    assert not len(wire.client.settle(turn).tokens)
    assert wire.client.counters.malformed == 2
    wire.draft(progress_of({1: [1], 2: [1]}, limit=3))
    assert wire.service.texts() == [[5, 1], [5, 1]]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step": 99}, "response 99 is out of order"),
        ({"step": 1}, "response 1 is out of order"),
        ({"error": pb.Error(code=3, message="invalid")}, "invalid"),
        ({"lost_ids": b"123"}, "lost_ids has 3 bytes"),
    ],
)
def test_after_a_violation_sequences_are_registered_on_a_new_stream(changes, reason):
    wire = connected()
    start(wire.client, 1, [5])
    wire.serve()
    response = wire.responses.pop()
    response.MergeFrom(pb.DraftResponse(**changes))
    with pytest.raises(WireError, match=reason):
        wire.client.receive(response.SerializeToString())
    wire.cut()
    wire.connect()
    wire.settle()
    assert wire.service.texts() == [[5]]


@pytest.mark.parametrize(
    ("response", "error", "reason"),
    [
        (pb.DraftResponse(step=1), RefusedError, "protocol 3"),
        (pb.DraftResponse(step=1, welcome=pb.Welcome(protocol=4)), RefusedError, "protocol 3"),
        (pb.DraftResponse(step=1, error=pb.Error(code=3, message="who?")), RefusedError, r"who\?"),
        (pb.DraftResponse(step=1, error=pb.Error(code=8, message="full")), WireError, "full"),
    ],
)
def test_invalid_answers_to_the_handshake_end_the_stream(response, error, reason):
    wire = Wire(FakeService())
    wire.connect()
    with pytest.raises(error, match=reason):
        wire.client.receive(response.SerializeToString())


def test_bytes_that_are_no_response_are_a_violation():
    with pytest.raises(WireError, match="a message is not a DraftResponse"):
        connected().client.receive(b"\xff" * 4)
