"""The sequences of one stream, without sockets: effects of requests, and refusals."""

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.observability.facts import MAX_ENGINES, OTHER_ENGINES, Engine, ModelIdentity
from drafter_service.server.namespace import Namespace
from drafter_service.server.requests import MAX_FIELDS
from drafter_service.server.session import Session
from drafter_service.settings.tree import Limits
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import pack
from ssd.base import LONG_PROMPT
from ssd.config import DrafterConfig
from ssd.corpus.corpus import Corpus
from tests.drafter_service.raw import batch, drafted, finish, lost, start
from tests.held_sorting import HeldSorting
from tests.strategies import array

CONFIG = DrafterConfig(capacity=10_000, refresh_interval_s=3600)
INVALID_ARGUMENT = 3
LONG = np.arange(10_000, 10_001 + LONG_PROMPT, dtype=np.uint32)


@pytest.fixture(scope="module")
def shared():
    namespace = new_namespace()
    yield namespace
    close(namespace)


@pytest.fixture
def namespace():
    namespace = new_namespace()
    yield namespace
    close(namespace)


@pytest.fixture
def session(namespace):
    return Session(namespace, Limits())


def new_namespace():
    return Namespace("some", ModelIdentity(), CONFIG, Corpus(CONFIG.capacity, CONFIG.match_depth))


def close(namespace):
    namespace.close()
    namespace.corpus.close()


def send(session, *, may_learn=True, **fields):
    response = session.answer(pb.DraftRequest(**fields), may_learn=may_learn)
    session.record()
    return response


def sizes_of(session):
    """Return the number of tokens of each sequence."""
    drafter, shadow = session._drafter, session._shadow
    sizes = {sequence_id: drafter.running.size_of(sequence_id) for sequence_id in drafter.running.ids}
    sizes |= {sequence_id: shadow.size_of(sequence_id) for sequence_id in session._withheld}
    assert session._tokens == sum(sizes.values())
    return sizes


def refused(response, message):
    assert response.error.code == INVALID_ARGUMENT
    assert message in response.error.message
    return True


def test_a_response_has_the_number_of_its_request_and_drafts(session):
    response = send(session, step=7, starts=[start(1, [5, 6, 5])], batch=batch({1: ()}, limit=2))
    assert response.step == 7
    assert drafted(response) == [6, 5]
    assert lost(response) == []


def test_refusals_name_the_field_and_have_no_effect(session):
    send(session, starts=[start(1, [5, 6, 5])])
    again = [start(2, [1]), start(1, [1])]
    assert refused(send(session, step=2, starts=again), "starts contains a sequence that is already running")
    assert refused(send(session, starts=[start(3, [1]), start(3, [1])]), "starts contains a sequence that is already")
    assert refused(send(session, finishes=[finish(1), finish(1)]), "finishes contains a sequence twice")
    claims = batch({1: ()})
    claims.verified = pack(array([1]), "u4")
    assert refused(send(session, batch=claims), "batch.verified[0] is 1; the sequence's last draft had 0 tokens")
    claims.verified = pack(array([0xFFFF_FFFF]), "u4")
    assert refused(send(session, batch=claims), "batch.verified[0] is 4294967295")
    new = batch({2: ()}, verified=1)
    assert refused(send(session, starts=[start(2, [1])], batch=new), "the sequence's last draft had 0 tokens")
    no_draft = "finishes[0].verified is 1; the sequence's last draft had 0 tokens"
    assert refused(send(session, finishes=[finish(1, verified=1)]), no_draft)
    assert refused(send(session, starts=[start(2, [1])], finishes=[finish(2, verified=1)]), no_draft)
    for cost in (0.0, -1.0, 1.5, float("nan"), float("inf")):
        assert refused(send(session, batch=batch({1: ()}, cost=cost)), f"batch.cost is {cost}")
    bad_prompt = pb.Start(sequence_id=2, prompt=b"12345")
    assert refused(send(session, starts=[bad_prompt]), "starts[0].prompt has 5 bytes")
    bad_tokens = pb.Finish(sequence_id=1, tokens=b"\xff\xff\xff\xff")
    assert refused(send(session, finishes=[bad_tokens]), "finishes[0].tokens holds the token id 4294967295")
    crowd = pb.Batch(sequence_ids=bytes(8 * (MAX_FIELDS + 1)))
    assert refused(send(session, batch=crowd), f"batch.sequence_ids has {MAX_FIELDS + 1} elements")
    # Sequence 1 still runs, and the others were not started.
    assert sizes_of(session) == {1: 3}
    response = send(session, step=9, starts=[start(2, [8])], batch=batch({2: (), 1: ()}, limit=2))
    assert [drafted(response, 2, index) for index in (0, 1)] == [[], [6, 5]]


def test_unknown_sequences_are_reported_and_the_others_served(session):
    send(session, starts=[start(1, [5, 6, 5])])
    response = send(session, finishes=[finish(7), finish(8, [1], verified=3)], batch=batch({9: [4], 1: (), 6: ()}, 2))
    assert lost(response) == [7, 8, 9, 6]
    assert [drafted(response, 3, index) for index in range(3)] == [[], [6, 5], []]
    # Finishes come before the batch.
    assert lost(send(session, finishes=[finish(1)], batch=batch({1: ()}))) == [1]


def test_a_sequence_can_begin_and_end_in_one_request(namespace, session):
    response = send(session, starts=[start(1, [1, 2])], finishes=[finish(1, [3, 4])])
    assert lost(response) == []
    assert sizes_of(session) == {}
    namespace.corpus.refresh()
    assert drafted(send(session, starts=[start(1, [1, 2])], batch=batch({1: ()}, limit=2))) == [3, 4]


@given(st.data())
def test_a_damaged_request_is_refused_or_answered_and_the_session_continues(shared, data):
    session = Session(shared, Limits())
    send(session, starts=[start(1, [5, 6, 5]), start(3, [1, 2, 1])])
    send(session, batch=batch({1: (), 3: ()}))  # So that there are counts to damage.
    whole = pb.DraftRequest(
        step=3,
        starts=[start(2, [1, 2], session_id="s", request_id="r")],
        finishes=[finish(3, [2], verified=1, steps=1)],
        batch=batch({1: [6], 2: ()}, verified=0),
        counters=pb.ClientCounters(timeouts=3, reconnects=1),
    )
    message = bytearray(whole.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    try:
        request = pb.DraftRequest.FromString(bytes(message))
    except DecodeError:
        request = whole
    sizes = sizes_of(session)
    if session.answer(request, may_learn=False).HasField("error"):
        assert sizes_of(session) == sizes
    another = 1 << 60  # Far from any damaged small id.
    response = send(session, starts=[start(another, [5, 6, 5])], batch=batch({another: ()}, limit=2))
    # Requests that were accepted although damaged teach that drafts fail, so the next ones may be shorter.
    assert drafted(response)[:1] == [6]
    session.close()


TOKENS = st.lists(st.integers(0, 3), max_size=5)
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["start", "finish", "draft"]), st.integers(0, 4), TOKENS, st.booleans()), max_size=20
)


@given(ACTIONS)
def test_sequences_have_the_tokens_that_were_sent(shared, actions):
    """Compare the session with a dictionary of texts."""
    session, sent = Session(shared, Limits()), {}
    for action, sequence_id, tokens, learn in actions:
        was_running = sequence_id in sent
        if action == "start":
            response = send(session, starts=[start(sequence_id, tokens, session_id="s" if learn else "")])
            assert response.HasField("error") == was_running
            sent.setdefault(sequence_id, list(tokens))
        elif action == "finish":
            response = send(session, finishes=[finish(sequence_id, tokens, learn=learn)])
            assert lost(response) == ([] if was_running else [sequence_id])
            sent.pop(sequence_id, None)
        else:
            response = send(session, batch=batch({sequence_id: tokens}))
            assert lost(response) == ([] if was_running else [sequence_id])
            if was_running:
                sent[sequence_id] += tokens
        assert sizes_of(session) == {key: len(text) for key, text in sent.items()}
    session.close()


def counts_of(namespace):
    """Return streams, steps of the engine, offered tokens, and all statistics of each engine of a namespace."""
    return {
        engine: (use.streams, use.engine_steps, use.offered, [array.tolist() for array in use.stats.counters])
        for engine, use in namespace.facts().uses.items()
    }


def test_use_is_counted_by_engine(namespace):
    vllm, sglang = Engine("vllm/1", "a"), Engine("sglang/2", "b")
    first, second = Session(namespace, Limits(), vllm), Session(namespace, Limits(), sglang)
    send(first, starts=[start(1, [5, 6, 5]), start(2, [6])], batch=batch({1: [], 2: []}, limit=2))
    several = batch({1: [6, 8], 2: []}, verified=0)
    several.verified, several.steps = pack(array([2, 0]), "u4"), pack(array([1, 5]), "u4")
    send(first, batch=several)
    send(first, finishes=[finish(1, [9, 10, 11], steps=3), finish(2)])
    send(second, starts=[start(1, [5])], batch=batch({1: [6, 7]}))
    second.close()
    uses = namespace.facts().uses
    assert [*uses] == [vllm, sglang]
    stats = uses[vllm].stats
    assert (uses[vllm].streams, uses[vllm].engine_steps) == (1, 2)
    assert (stats.steps, stats.committed, stats.verified, stats.accepted) == (4, 5, 2, 1)
    assert uses[vllm].offered >= 2
    assert (uses[sglang].streams, uses[sglang].stats.steps, uses[sglang].stats.committed) == (0, 1, 2)
    assert (namespace.stats.steps, namespace.stats.committed, namespace.stats.accepted) == (5, 7, 1)


def test_the_engine_that_was_disconnected_for_longest_is_dropped_first(namespace):
    def connect(number):
        return Session(namespace, Limits(), Engine("host/1", str(number)))

    sessions = [connect(number) for number in range(MAX_ENGINES)]
    connect("more")
    assert namespace.facts().uses[OTHER_ENGINES].streams == 1, "all are connected"
    send(sessions[7], starts=[start(1, [5])], batch=batch({1: [6, 7]}))
    for number in (7, 3):
        sessions[number].close()
    for name, dropped in (("x", "7"), ("y", "3")):
        connect(name)
        names = [engine.name for engine in namespace.facts().uses]
        assert name in names
        assert dropped not in names
        assert len(names) == MAX_ENGINES + 1
    assert namespace.stats.committed == 2, "statistics of a dropped engine are kept"


def test_steps_of_sequences_are_counted(namespace, session):
    send(session, starts=[start(1, [5, 6, 5]), start(2, [1])], batch=batch({1: ()}, limit=2))
    send(session, finishes=[finish(1, [6, 5, 8], verified=2)])
    assert (namespace.stats.steps, namespace.stats.committed, namespace.stats.accepted) == (1, 3, 2)
    several = batch({2: [1, 1]})
    several.steps = pack(array([2]), "u4")
    send(session, batch=several)
    assert (namespace.stats.steps, namespace.stats.committed) == (3, 5)
    send(session, finishes=[finish(2, [1, 1, 1], steps=3)])
    assert (namespace.stats.steps, namespace.stats.committed) == (6, 8)


@pytest.mark.parametrize(
    ("fields", "learn", "may_at_first", "may_at_last"),
    [
        ({"learn": False}, True, True, True),
        ({}, False, True, True),
        ({}, True, False, True),
        ({}, True, True, False),
    ],
    ids=["private", "not to be learned", "no right at first", "no right at last"],
)
def test_nothing_is_learned_without_permission(namespace, session, fields, learn, may_at_first, may_at_last):
    send(session, starts=[start(1, [1, 2, 3], **fields)], may_learn=may_at_first)
    send(session, finishes=[finish(1, [4, 5], learn=learn)], may_learn=may_at_last)
    namespace.corpus.refresh()
    assert namespace.corpus.appended == 0


@pytest.mark.parametrize(("learn", "may_learn"), [(True, True), (False, True), (True, False)])
def test_running_sequences_are_drafted_to_others_if_they_may_be_learned(namespace, learn, may_learn):
    first, second = (Session(namespace, Limits()) for _ in range(2))
    send(first, starts=[start(1, [1, 2, 3], learn=learn)], may_learn=may_learn)
    send(second, starts=[start(1, [2, 3])])
    send(first, batch=batch({1: [4, 5, 6]}), may_learn=may_learn)
    namespace.corpus.refresh()
    is_shown = may_learn and learn
    assert drafted(send(second, batch=batch({1: ()}, limit=3))) == ([4, 5, 6] if is_shown else [])


@pytest.mark.parametrize("steps", [[], [1]])
def test_the_sequences_that_were_inactive_for_longest_are_dropped(namespace, steps):
    session = Session(namespace, Limits(sequences=2))
    send(session, starts=[start(1, [1]), start(2, [2])])
    progress = batch({1: [1]})
    progress.steps = pack(array(steps), "u4")
    send(session, batch=progress)
    send(session, starts=[start(3, [3])])
    assert sizes_of(session) == {1: 2, 3: 1}
    assert lost(send(session, batch=batch({1: (), 2: ()}))) == [2]
    send(session, starts=[start(sequence_id, [1]) for sequence_id in range(4, 40)])
    assert sizes_of(session) == {38: 1, 39: 1}
    assert namespace.sequences == 2


def test_the_tokens_of_a_stream_are_bounded(namespace):
    session = Session(namespace, Limits(stream_tokens=100))
    send(session, starts=[start(1, range(60)), start(2, range(30))])
    send(session, batch=batch({2: range(20)}))
    assert sizes_of(session) == {2: 50}
    assert refused(send(session, starts=[start(3, range(101))]), "starts has 101 tokens; a stream may have 100")
    send(session, batch=batch({2: range(51)}))
    assert sizes_of(session) == {}
    assert namespace.corpus.appended == 0


def test_batches_of_the_same_sequences_are_counted_and_checked(namespace):
    session = Session(namespace, Limits(stream_tokens=100))
    send(session, starts=[start(1, range(10)), start(2, [5, 6, 5])])
    for _ in range(3):
        assert drafted(send(session, batch=batch({1: [50], 2: [6, 5]}, limit=2)), 2, 1) == [6, 5]
    # Malformed batches of these sequences have no effect.
    wrong = batch({1: [51], 2: []}, verified=9)
    assert refused(send(session, batch=wrong), "batch.verified[0] is 9")
    wrong.offsets = bytes(4)
    assert refused(send(session, batch=wrong), "batch.offsets has 1 elements, not 3")
    assert drafted(send(session, batch=batch({1: [], 2: []}, limit=2)), 2, 1) == [6, 5]
    # The tokens of all these batches count: 13 of sequence 1, the newer one, and 9 of sequence 2.
    send(session, starts=[start(3, range(79))])
    assert sizes_of(session) == {2: 9, 3: 79}
    assert lost(send(session, batch=batch({1: [], 2: []}))) == [1]


def random_batches(rng):
    """Return batches of five sequences, of which two are unknown; every third one is damaged."""
    for number in range(60):
        chosen = rng.permutation(5)[: rng.integers(0, 6)].tolist()
        drawn = batch({key: rng.integers(0, 3, rng.integers(0, 4)) for key in chosen}, limit=4, verified=0)
        if number % 3 == 0:
            name = ("sequence_ids", "tokens", "offsets", "verified", "max_draft", "steps")[rng.integers(6)]
            data = bytearray(getattr(drawn, name) or bytes(4))
            data[rng.integers(len(data))] = rng.integers(256)
            setattr(drawn, name, bytes(data[: rng.integers(len(data) + 1)]))
        yield drawn


def test_batches_are_answered_as_by_the_general_path(monkeypatch):
    answers, sizes, uses = [], [], []
    for is_general in (False, True):
        if is_general:
            monkeypatch.setattr(Session, "_draft_ready", lambda *_: None)
        namespace = new_namespace()
        session = Session(namespace, Limits())
        send(session, starts=[start(number, [0, 1, 2, 0, 1], learn=False) for number in range(3)])
        answers.append([send(session, batch=each) for each in random_batches(np.random.default_rng(0))])
        sizes.append(sizes_of(session))
        uses.append(counts_of(namespace))
        close(namespace)
    assert answers[0] == answers[1]
    assert len({answer.WhichOneof("result") for answer in answers[0]}) == 2
    assert sizes[0] == sizes[1]
    assert uses[0] == uses[1]


def test_clients_counters_are_summed(namespace):
    def report(session, **totals):
        send(session, counters=pb.ClientCounters(**totals))

    one, other = Engine("host/1", "one"), Engine("host/1", "other")
    first, second = Session(namespace, Limits(), one), Session(namespace, Limits(), other)
    report(first, timeouts=3, dropped=2)
    report(first, timeouts=5, dropped=3)
    report(second, timeouts=10)
    assert (namespace.clients.timeouts, namespace.clients.dropped) == (15, 3)
    # A client that has reconnected sent most of these totals before.
    again = Session(namespace, Limits(), one)
    report(again, timeouts=4, dropped=3, reconnects=2)
    report(again, timeouts=6, dropped=3, reconnects=2)
    assert (namespace.clients.timeouts, namespace.clients.dropped, namespace.clients.reconnects) == (17, 3, 1)
    # Steps whose responses came later were counted with their requests.
    late = {engine: (use.late_steps, use.engine_steps) for engine, use in namespace.facts().uses.items()}
    assert late == {one: (7, 4), other: (10, 10)}


def test_a_long_prompt_is_sorted_while_others_are_served(session):
    held, prompt = HeldSorting(session._drafter), [*LONG, 9001, 9002, 9003, 9001]
    response = send(session, starts=[start(1, prompt), start(2, [5, 6, 5])], batch=batch({1: (), 2: ()}, limit=2))
    assert [drafted(response, 2, index) for index in (0, 1)] == [[], [6, 5]]
    response = send(session, batch=batch({2: [6], 1: [9002]}, limit=1))
    assert [drafted(response, 2, index) for index in (0, 1)] == [[5], []]
    assert sizes_of(session) == {1: len(prompt) + 1, 2: 4}
    held.run()
    assert drafted(send(session, batch=batch({1: ()}, limit=2))) == [9003, 9001]
    assert sizes_of(session) == {1: len(prompt) + 1, 2: 4}


@pytest.mark.parametrize("rights", [(True, True), (True, False), (False, True)])
def test_a_sequence_that_ends_before_its_prompt_is_sorted_is_learned_only_with_the_right(session, rights):
    namespace = session.namespace
    HeldSorting(session._drafter)
    send(session, starts=[start(1, LONG)], batch=batch({1: [7001, 7002]}), may_learn=rights[0])
    assert lost(send(session, finishes=[finish(1, [7003, 7004])], may_learn=rights[1])) == []
    assert sizes_of(session) == {}
    namespace.corpus.refresh()
    # The id can be reused at once.
    learned = drafted(send(session, starts=[start(1, LONG)], batch=batch({1: ()}, limit=4)))
    assert learned == ([7001, 7002, 7003, 7004] if all(rights) else [])
    assert (namespace.stats.committed, namespace.stats.steps) == (4, 2)


def test_a_failure_of_the_drafter_is_not_an_unknown_sequence(session, monkeypatch):
    send(session, starts=[start(1, [5, 6, 5])])
    own = session._drafter.draft_unpublished

    def fail_once(batch):
        monkeypatch.setattr(session._drafter, "draft_unpublished", own)
        raise ValueError("operands could not be broadcast together")

    monkeypatch.setattr(session._drafter, "draft_unpublished", fail_once)
    with pytest.raises(ValueError, match="broadcast"):
        send(session, batch=batch({1: ()}))


def test_a_sequence_may_be_dropped_before_its_prompt_is_sorted(session):
    session = Session(session.namespace, Limits(sequences=2, stream_tokens=len(LONG) + 100))
    HeldSorting(session._drafter)
    send(session, starts=[start(1, LONG), start(2, [1])])
    send(session, starts=[start(3, range(200))])
    assert sizes_of(session) == {2: 1, 3: 200}
    assert lost(send(session, batch=batch({1: ()}))) == [1]
    too_long = [start(4, LONG), start(5, range(101))]
    assert refused(send(session, starts=too_long), f"a stream may have {len(LONG) + 100}")


def test_token_ids_outside_the_vocabulary_are_refused_without_effect(namespace):
    namespace.adopt(ModelIdentity(vocab_size=10))
    session = Session(namespace, Limits())
    known = send(session, starts=[start(1, [5, 6, 5])], batch=batch({1: ()}, limit=1))
    ten = pack(array([10]), "u4")
    for place, fields in {
        "starts[0].prompt": {"starts": [start(2, [9, 10])]},
        "starts[0].committed": {"starts": [start(2, [9], committed=ten)]},
        "starts[0].hints": {"starts": [start(2, [9], hints=ten)]},
        "finishes[0].tokens": {"finishes": [finish(1, [10])]},
        "batch.tokens": {"batch": batch({1: [10]})},
    }.items():
        assert refused(send(session, **fields), f"{place} holds the id 10; the vocabulary has 10 tokens")
    assert drafted(known) == drafted(send(session, batch=batch({1: ()}, limit=1))) == [6]
