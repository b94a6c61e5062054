"""A namespace: what it learns and forgets, and when."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.replication.events import Event, Kind
from drafter_service.server.session import Session
from drafter_service.server.store import Description
from drafter_service.settings.tree import Limits
from ssd.corpus.requests import hash_of, id_of_hash
from tests.drafter_service.guarded import Clock
from tests.drafter_service.raw import batch, drafted, finish, start
from tests.drafter_service.server.opened_namespaces import answered, draft_of, still_namespace
from tests.strategies import array


@pytest.fixture
def clock():
    clock = Clock()
    clock.now = 1000.0
    return clock


@pytest.fixture
def namespace(clock):
    with still_namespace(clock=clock) as namespace:
        yield namespace


def test_a_name_is_learned_once_until_it_is_forgotten(namespace, clock):
    published = []
    namespace.publish = published.append
    assert namespace.learn(array([1, 2, 3, 4]), "r")
    assert not namespace.learn(array([1, 2, 3, 5]), "r")
    assert namespace.learn(array([5, 6, 7, 8]), None)
    assert namespace.learn(array([5, 6, 7, 8]), None)
    assert namespace.duplicates == 1
    namespace.forget("r")
    namespace.corpus.refresh()
    assert draft_of(namespace, [1, 2, 3], 1) == []
    assert namespace.learn(array([1, 2, 3, 9]), "r")
    namespace.corpus.refresh()
    assert draft_of(namespace, [1, 2, 3], 1) == [9]
    clock.now += 10
    assert namespace.learn(array([4, 4, 5]), "s")
    namespace.forget_before(clock.now)
    namespace.corpus.refresh()
    assert namespace.learn(array([1, 2, 3, 7]), "r")
    assert not namespace.learn(array([4, 4, 5]), "s")
    finished, forgotten, before = Kind.FINISHED, Kind.FORGOTTEN, Kind.FORGOTTEN_BEFORE
    kinds = [finished, finished, finished, forgotten, finished, finished, before, finished]
    assert [event.kind for event in published] == kinds


EVENTS = [Event(kind, time, name) for kind in Kind for time in (0.0, 1.0, 2.0, 3.0) for name in "ab"]


@given(st.lists(st.sampled_from(EVENTS), min_size=6, max_size=12))
def test_text_from_the_log_is_learned_unless_an_earlier_event_forgets_it(events):
    with still_namespace(clock=lambda: 1000.0) as namespace:
        known, published, later = {}, [], []
        namespace.publish = published.append
        check_events(namespace, events, known, later)
        namespace.corpus.refresh()
        assert {name for name in "ab" if namespace.has_learned(name)} == known.keys()
        assert (namespace.corpus.requests, namespace.duplicates, published) == (len(known), 0, later)


def check_events(namespace, events, known, later):
    """Check one event after another; add to `later` those that forget a text which finished after it was forgotten."""
    for index, (kind, time, name, *_) in enumerate(events):
        match kind:
            case Kind.FINISHED:
                is_forgotten = any(
                    (other.kind is Kind.FORGOTTEN and other.request == name and time <= other.time)
                    or (other.kind in (Kind.FORGOTTEN_BEFORE, Kind.DROPPED) and time < other.time)
                    for other in (*events[:index], *later)
                )
                is_learned = namespace.learn(array([1, 2]), name, finished_at=time, is_from_log=True)
                assert is_learned == (not is_forgotten and name not in known)
                known.update({name: time} if is_learned else {})
            case Kind.FORGOTTEN:
                namespace.forget(name, logged_at=time)
                finished_at = known.pop(name, time)
                later += [Event(Kind.FORGOTTEN, finished_at, name)] if finished_at > time else []
            case _:
                namespace.forget_before(time, logged_at=time)
                for old in [name for name, learned_at in known.items() if learned_at < time]:
                    del known[old]


def test_only_the_newest_forgotten_names_are_kept(namespace, monkeypatch):
    monkeypatch.setattr("drafter_service.server.namespace.MAX_FORGOTTEN", 2)
    for name in "abc":
        namespace.forget(name, logged_at=9.0)
    learned = [namespace.learn(array([1]), name, finished_at=5.0, is_from_log=True) for name in "abc"]
    assert learned == [True, False, False]


def test_names_that_were_forgotten_are_restored_as_far_as_they_are_kept(namespace, monkeypatch):
    for name in "abc":
        namespace.forget(name, logged_at=9.0)
    monkeypatch.setattr("drafter_service.server.namespace.MAX_FORGOTTEN", 2)
    with still_namespace() as again:
        again.restore(namespace.describe())
        assert [again.was_forgotten(name, 60.0) for name in "abcd"] == [False, True, True, False]
        learned = [again.learn(array([1]), name, finished_at=5.0, is_from_log=True) for name in "abc"]
        assert learned == [True, False, False]


def test_text_that_was_forgotten_by_its_age_is_not_learned_from_the_log_after_a_restart(namespace, clock):
    for moment, learned in ((None, [True, True]), (500.0, [False, True]), (math.inf, [False, False])):
        if moment is not None:
            namespace.forget_before(moment)
        with still_namespace(clock=clock) as again:
            again.restore(Description.model_validate_json(namespace.describe().model_dump_json()))
            times = (499.0, 501.0)
            assert [again.learn(array([1]), None, finished_at=time, is_from_log=True) for time in times] == learned


def test_text_that_is_older_has_its_time_here_and_in_the_log(namespace, clock):
    published = []
    namespace.publish = published.append
    assert namespace.learn(array([1, 2]), "old", 7, finished_at=clock.now - 10)
    assert namespace.learn(array([1, 2]), id_of_hash(hash_of("new")))
    assert [(event.time, event.tag) for event in published] == [(clock.now - 10, 7), (clock.now, 0)]
    assert namespace.has_learned("new")
    forgotten = [namespace.forget_before(clock.now - 5), *(namespace.forget(name) for name in ("old", "new", "new"))]
    namespace.corpus.refresh()
    assert [command.requests for command in forgotten] == [1, 0, 1, 0]
    assert namespace.corpus.tokens == 0


def test_running_sequences_are_counted_as_forgotten(namespace):
    drafter = namespace.new_drafter()
    for number, name in enumerate("aab"):
        drafter.start(number, array([5]), request_id=name)
    assert [namespace.forget(name).requests for name in "aabc"] == [2, 0, 1, 0]


def test_the_number_of_remembered_names_is_bounded(namespace, monkeypatch):
    monkeypatch.setattr("drafter_service.server.namespace.MIN_NAMES", 80)
    nothing = np.empty(0, np.uint32)
    for number in range(1000):
        namespace.learn(nothing, f"{number}")
    assert 80 <= sum(namespace.has_learned(f"{number}") for number in range(1000)) <= 90
    assert not namespace.learn(nothing, "930")
    assert namespace.learn(nothing, "0")


def test_the_names_of_all_requests_in_the_corpus_are_remembered(monkeypatch):
    monkeypatch.setattr("drafter_service.server.namespace.MIN_NAMES", 80)
    with still_namespace() as namespace:
        for number in range(1000):
            assert namespace.learn(array([1, 2]), f"{number}")
            if number % 300 == 0:
                namespace.corpus.refresh()
        assert not any(namespace.learn(array([1, 2]), f"{number}") for number in range(1000))
        for number in range(300):  # These overwrite all others.
            namespace.learn(np.ones(1000, np.uint32), f"long-{number}")
            namespace.corpus.refresh()
        assert not namespace.has_learned("999")


def test_a_text_that_the_corpus_drops_may_be_sent_again(namespace, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(namespace.corpus, "append", lambda *_, **__: False)
        assert not namespace.learn(array([1, 2, 3, 4]), "r")
    assert (namespace.has_learned("r"), namespace.duplicates) == (False, 0)
    assert namespace.learn(array([1, 2, 3, 4]), "r")


def test_ages_are_measured_with_the_current_clock(namespace, clock):
    for now, text in ((1000.0, [1, 2, 3, 4]), (2000.0, [15, 16, 17, 18]), (1500.0, [22, 24, 26, 28])):
        clock.now = now
        namespace.learn(array(text), None)
    namespace.forget_before(1600.0)
    namespace.corpus.refresh()
    assert [draft_of(namespace, context, 1) for context in ([1, 2, 3], [15, 16, 17], [22, 24, 26])] == [[], [18], []]
    # After it is set back, nothing is older than the epoch.
    clock.now = 10.0
    namespace.forget_before(clock.now - 100)
    namespace.corpus.refresh()
    assert draft_of(namespace, [15, 16, 17], 1) == [18]


def test_the_time_in_the_shared_log_is_finite(namespace, clock):
    published = []
    namespace.publish = published.append
    namespace.forget_before(float("inf"))
    namespace.forget_before(5.0)
    assert [event[:2] for event in published] == [(Kind.DROPPED, clock.now), (Kind.FORGOTTEN_BEFORE, 5.0)]


# --- Fallback candidates

SECRET = 4000


def with_secret(namespace, **fields):
    """Return a session whose sequence 1 has produced a token that was not among the candidates of its draft."""
    session = Session(namespace, Limits(sequences=1))
    answered(session, starts=[start(1, [1], request_id="mine", **fields)], batch=batch({1: ()}))
    answered(session, batch=batch({1: [SECRET]}))
    return session


def is_secret_drafted(namespace):
    """Return whether another stream is offered what `with_secret` produced, after text that occurs nowhere else."""
    session = Session(namespace, Limits())
    tokens = drafted(answered(session, starts=[start(1, [60], learn=False)], batch=batch({1: ()}, cost=1e-6)))
    session.close()
    return any(token >= SECRET for token in tokens)


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("from_log", [False, True])
def test_fallback_tokens_of_a_running_request_are_forgotten(namespace, shadow, from_log):
    session = with_secret(namespace, shadow=shadow)
    assert is_secret_drafted(namespace)
    namespace.forget("mine", logged_at=5.0 if from_log else None)
    namespace.corpus.refresh()
    assert not is_secret_drafted(namespace)
    # The request continues.
    answered(session, batch=batch({1: [SECRET + 1]}))
    assert not is_secret_drafted(namespace)
    answered(session, finishes=[finish(1, [SECRET + 2])])
    namespace.corpus.refresh()
    assert not is_secret_drafted(namespace)


def finish_and(forget):
    """Return a function that ends sequence 1, and then forgets its text."""

    def end(namespace, session, _shadow):
        answered(session, finishes=[finish(1)])
        namespace.corpus.refresh()
        assert is_secret_drafted(namespace)
        forget(namespace)
        namespace.corpus.refresh()

    return end


@pytest.mark.parametrize(
    "end",
    [
        finish_and(lambda namespace: namespace.forget("mine")),
        finish_and(lambda namespace: namespace.forget_before(float("inf"))),
        lambda _namespace, session, _shadow: answered(session, finishes=[finish(1, learn=False)]),
        lambda _namespace, session, shadow: answered(session, starts=[start(2, [1], shadow=shadow)]),
        lambda _namespace, session, _shadow: session.close(),
        lambda namespace, _session, _shadow: namespace.close(),
    ],
    ids=["forgotten", "older", "canceled", "dropped", "disconnected", "unloaded"],
)
@pytest.mark.parametrize("shadow", [False, True])
def test_fallback_tokens_of_a_request_that_is_not_remembered_are_forgotten(namespace, end, shadow):
    session = with_secret(namespace, shadow=shadow)
    assert is_secret_drafted(namespace)
    end(namespace, session, shadow)
    assert not is_secret_drafted(namespace)


def test_fallback_tokens_of_a_private_request_are_not_drafted(namespace):
    with_secret(namespace, learn=False)
    assert not is_secret_drafted(namespace)
