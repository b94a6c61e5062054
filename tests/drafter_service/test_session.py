from hypothesis import given
from hypothesis import strategies as st

from drafter_service.session import Session
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.wire import batch_message, pack, read_drafts
from ssd.build import new_corpus
from ssd.config import DrafterConfig
from ssd.drafter import SuffixDrafter
from tests.replay import progress_of
from tests.strategies import array

CONFIG = DrafterConfig(capacity=10_000)
INVALID_ARGUMENT = 3


def new_session():
    return Session(SuffixDrafter(CONFIG, corpus=new_corpus(CONFIG)))


def ask(session, **fields):
    return session.answer(pb.DraftRequest(**fields).SerializeToString())


def start(sequence_id, *tokens):
    return pb.Start(sequence_id=sequence_id, prompt=pack(array(list(tokens)), "u4"))


def finish(sequence_id, *tokens, learn=True):
    return pb.Finish(sequence_id=sequence_id, tokens=pack(array(list(tokens)), "u4"), learn=learn)


def batch(*sequence_ids, limit=2, cost=None):
    return batch_message(progress_of(dict.fromkeys(sequence_ids, ()), limit, cost=cost))


def test_a_step_is_answered_with_its_number_and_drafts():
    session = new_session()
    reply = ask(session, step=7, starts=[start(1, 5, 6, 5)], batch=batch(1))
    assert reply.step == 7
    assert read_drafts(reply.drafts, 1).tokens.tolist() == [6, 5]


def test_the_engines_cost_is_passed_on():
    session = new_session()
    ask(session, starts=[start(1, 1, 2, 3, 4, 5, 6, 1, 2)])
    sizes = [
        len(read_drafts(ask(session, batch=batch(1, limit=32, cost=cost)).drafts, 1).tokens)
        for cost in (0.0001, None, CONFIG.cost, 0.4, 1.0)
    ]
    assert sizes[0] > sizes[1] == sizes[2] > sizes[3] >= sizes[4] == 0


def refused(reply, message):
    assert reply.error.code == INVALID_ARGUMENT
    assert message in reply.error.message
    return True


def test_refusals_name_the_field_and_have_no_effect():
    session = new_session()
    ask(session, starts=[start(1, 5, 6, 5)])
    assert refused(
        ask(session, step=2, starts=[start(2, 1), start(1, 1)]), "starts[1].sequence_id 1 is running already"
    )
    assert refused(ask(session, starts=[start(3, 1), start(3, 1)]), "starts[1].sequence_id 3")
    assert refused(ask(session, finishes=[finish(9)]), "finishes[0].sequence_id 9 was not started")
    assert refused(ask(session, finishes=[finish(1), finish(1)]), "finishes[1].sequence_id 1")
    assert refused(ask(session, finishes=[finish(1)], batch=batch(1)), "batch.sequence_ids[0] 1 was not started")
    assert refused(ask(session, starts=[start(2)], batch=batch(1, 4)), "batch.sequence_ids[1] 4 was not started")
    claims = batch(1)
    claims.verified = pack(array([1]), "u4")
    assert refused(ask(session, batch=claims), "batch.verified[0] is 1; the sequence's last draft had 0 tokens")
    claims.verified = pack(array([0xFFFF_FFFF]), "u4")
    assert refused(ask(session, batch=claims), "batch.verified[0] is 4294967295")
    claims.verified, claims.accepted = pack(array([0]), "u4"), pack(array([1]), "u4")
    assert refused(ask(session, batch=claims), "batch.accepted[0] is 1, of 0 verified")
    ended = pb.Finish(sequence_id=1, verified=1)
    assert refused(ask(session, finishes=[ended]), "finishes[0].verified is 1; the sequence's last draft had 0 tokens")
    for cost in (0.0, -1.0, 1.5, float("nan"), float("inf")):
        assert refused(ask(session, batch=batch(1, cost=cost)), f"batch.cost is {cost}")
    bad_prompt = pb.Start(sequence_id=2, prompt=b"12345")
    assert refused(ask(session, starts=[bad_prompt]), "starts[0].prompt has 5 bytes")
    bad_tokens = pb.Finish(sequence_id=1, tokens=b"\xff\xff\xff\xff")
    assert refused(ask(session, finishes=[bad_tokens]), "finishes[0].tokens holds the token id 4294967295")
    # Sequence 1 still runs, sequence 2 never began.
    reply = ask(session, step=9, starts=[start(2, 8)], batch=batch(2, 1))
    assert [read_drafts(reply.drafts, 2).tokens_of(index).tolist() for index in (0, 1)] == [[], [6, 5]]


@given(st.binary(max_size=60))
def test_any_bytes_are_answered(data):
    reply = new_session().answer(data)
    assert reply.HasField("drafts") or reply.error.code == INVALID_ARGUMENT


@given(st.data())
def test_a_damaged_request_is_refused_or_answered_and_the_session_lives_on(data):
    session = new_session()
    ask(session, starts=[start(1, 5, 6, 5)])
    ask(session, batch=batch(1))  # so that there are counts to lie about
    message = bytearray(pb.DraftRequest(step=3, starts=[start(2, 1, 2)], batch=batch(1, 2)).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    session.answer(bytes(message))
    another = 1 << 60  # far from what damage makes of a small id
    reply = ask(session, starts=[start(another, 5, 6, 5)], batch=batch(another))
    assert read_drafts(reply.drafts, 1).tokens.tolist() == [6, 5]


def test_the_last_step_of_a_sequence_counts():
    drafter = SuffixDrafter(CONFIG, corpus=new_corpus(CONFIG))
    session = Session(drafter)
    ask(session, starts=[start(1, 5, 6, 5)], batch=batch(1))
    ended = pb.Finish(sequence_id=1, tokens=pack(array([6, 5, 8]), "u4"), verified=2, accepted=2)
    assert ask(session, finishes=[ended]).HasField("drafts")
    assert (drafter.stats.steps, drafter.stats.committed, drafter.stats.accepted) == (1, 3, 2)


def test_streams_share_what_was_learned_and_nothing_else():
    corpus = new_corpus(CONFIG)
    first, second = (Session(SuffixDrafter(CONFIG, corpus=corpus)) for _ in range(2))
    ask(first, starts=[start(1, 1, 2, 3)])
    ask(first, finishes=[finish(1, 4, 5)])
    corpus.refresh()
    assert refused(ask(second, finishes=[finish(1)]), "was not started on this stream")
    reply = ask(second, starts=[start(1, 2, 3)], batch=batch(1))
    assert read_drafts(reply.drafts, 1).tokens.tolist() == [4, 5]


def test_an_ended_stream_teaches_nothing():
    corpus = new_corpus(CONFIG)
    session = Session(SuffixDrafter(CONFIG, corpus=corpus))
    ask(session, starts=[start(1, 1, 2, 3)])
    session.close()
    corpus.refresh()
    assert corpus.tokens == 0
