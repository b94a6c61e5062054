"""The changes that are kept for clients that draft from a copy: what is sent, erased and dropped."""

import asyncio
import itertools
import math

import pytest

from drafter_service.client.copies import Copy
from drafter_service.server import feed
from drafter_service.server.feed import CopyStream, Feed
from drafter_service.stubs import drafter_pb2 as pb
from ssd.config import DrafterConfig
from ssd.corpus.requests import hash_of, id_of_hash
from ssd.corpus.ring import MAX_CAPACITY
from tests.drafter_service.guarded import run
from tests.drafter_service.raw import counted
from tests.drafter_service.server.opened_namespaces import still_namespace
from tests.strategies import array


def responses_to(namespace, copy="", position=0):
    stream = CopyStream("some", copy, position, MAX_CAPACITY, "", [])
    return namespace.feed.responses(namespace.corpus, stream)


async def followed(namespace):
    """Let a client take a copy and go away; return its first responses, of which the last has its position."""
    stream, received = responses_to(namespace), []
    while not (received and received[-1].is_current):
        received.append(await anext(stream))
    await stream.aclose()
    return received


def added(changes, number):
    """Add short texts to a feed."""
    for each in range(number):
        changes.add(pb.Change(finished=pb.FinishedText(tokens=bytes(64), request_id=f"{each}", time=1.0)))


async def filled(number):
    """Return a feed, with a client that is away, and short texts since."""
    with still_namespace() as namespace:
        await followed(namespace)
        added(namespace.feed, number)
        return namespace.feed


FORGETTING = {
    "name": lambda namespace: namespace.forget("secret"),
    "hash": lambda namespace: namespace.forget(id_of_hash(hash_of("secret"))),
    "log": lambda namespace: namespace.forget("secret", logged_at=2e9),
    "age": lambda namespace: namespace.forget_before(150.0),
    "everything": lambda namespace: namespace.forget_before(math.inf),
}


@run
@pytest.mark.parametrize("what", FORGETTING)
async def test_forgotten_text_is_not_sent_to_a_client_that_was_away(what):
    with still_namespace(clock=lambda: 1000.0) as namespace:
        received = await followed(namespace)
        namespace.learn(array(counted(100, 2000)), "secret", finished_at=100.0)
        namespace.learn(array(counted(5000)), "other", finished_at=200.0)
        size, end = namespace.feed.nbytes, namespace.feed.end
        FORGETTING[what](namespace)
        assert size - namespace.feed.nbytes > 4 * 2000 - 2 * feed.CHANGE_BYTES
        assert namespace.feed.end == end + 1
        stream = responses_to(namespace, received[0].copy, received[-1].position)
        response = await anext(stream)
        await stream.aclose()
        learned = [] if what == "everything" else ["other"]
        assert [each.finished.request_id for each in response.changes if each.HasField("finished")] == learned
        assert (len(response.changes), response.position, response.is_current) == (3, namespace.feed.end, True)
        # The client ignores the change that was erased.
        copy = Copy(pb.FollowRequest(), DrafterConfig(), 1 << 20, lambda: 0.0)
        for each in [*received, response]:
            copy.receive(each, 0.0)
        copy.corpus.refresh()
        assert copy.position == namespace.feed.end
        assert list(copy.corpus.request_times()) == [hash_of(name) for name in learned]
        copy.replace(None)


@run
async def test_a_name_that_is_learned_again_is_sent():
    with still_namespace() as namespace:
        received = await followed(namespace)
        namespace.learn(array([1, 2, 3]), "a")
        namespace.forget("a")
        namespace.learn(array([4, 5, 6]), "a")
        changes = namespace.feed.since(received[-1].position)
    assert [each.WhichOneof("what") for each in changes] == [None, "forgotten", "finished"]


@run
async def test_the_memory_of_changes_is_counted_and_limited():
    with still_namespace() as namespace:
        before = namespace.memory_bytes
        namespace.learn(array(counted(100)), "a")
        assert (namespace.feed.nbytes, namespace.feed.end) == (0, 1)
        await followed(namespace)
        changes, corpus = namespace.feed, namespace.memory_bytes - before
        added(changes, 50_000)
        assert feed.KEPT_BYTES - 2 * feed.CHANGE_BYTES < changes.nbytes <= feed.KEPT_BYTES
        assert namespace.memory_bytes == before + corpus + changes.nbytes
        # A change takes more than its text.
        assert changes.end - changes._first < 4096


@run
async def test_a_message_has_a_limited_number_of_changes():
    changes = await filled(3000)
    first = changes.since(0)
    assert len(first) <= 1024
    position, received = 0, []
    while position < changes.end:
        part = changes.since(position)
        received += [each.finished.request_id for each in part]
        position += len(part)
    assert received == [f"{number}" for number in range(3000)]


@run
async def test_a_limited_number_of_changes_is_dropped_at_once():
    changes = await filled(0)
    changes._sending = 1
    added(changes, 20_000)
    assert changes.since(0)
    changes._sending = 0
    kept = []
    while changes.nbytes > feed.KEPT_BYTES:
        added(changes, 1)
        kept.append(changes.end - changes._first)
    assert len(kept) > 50
    assert all(before - after < 256 for before, after in itertools.pairwise(kept))


def test_changes_that_are_not_kept_any_more_need_a_snapshot(monkeypatch):
    changes = asyncio.run(filled(0))
    monkeypatch.setattr(feed, "KEPT_BYTES", 2 * feed.CHANGE_BYTES + 10)
    for name in "abcd":
        changes.add(pb.Change(forgotten=name))
    assert [changes.since(position) is None for position in range(6)] == [True, True, False, False, False, True]
    assert [change.forgotten for change in changes.since(3)] == ["d"]


def test_nothing_is_kept_before_a_client_follows():
    changes = Feed()
    added(changes, 10)
    assert [changes.since(position) for position in (0, 9, 10)] == [None, None, []]
