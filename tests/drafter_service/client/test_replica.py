"""Drafting from a copy of the service's corpus, against the real server."""

import asyncio
import itertools
import json
import math
import os
import signal
import tempfile
from contextlib import contextmanager
from types import SimpleNamespace

import grpc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drafter_service.auth.connector import ClientAccess
from drafter_service.client import replica as replica_module
from drafter_service.client.replica import Copy, ReplicaClient
from drafter_service.observability.facts import ModelIdentity
from drafter_service.server import feed
from drafter_service.server.namespace import Namespace
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import WireError
from ssd.config import DrafterConfig
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus
from ssd.corpus.requests import hash_of
from ssd.corpus.sections import SnapshotError
from ssd.errors import UserError
from tests.drafter_service.guarded import caller_entry
from tests.drafter_service.raw import connected, counted, eventually
from tests.replay import drafter_of, progress_of, replay_one, replayed
from tests.servers import served
from tests.ssd.test_drafter import TEXT
from tests.strategies import array

numbers = itertools.count()


@pytest.fixture(scope="module")
def service():
    """Yield a server that no test stops, with a snapshot folder."""
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        address = f"unix:{folder}/drafter.sock"
        with served("--listen", address, "--capacity", "400k", "--snapshot-folder", f"{folder}/snapshots"):
            yield SimpleNamespace(address=address)


@pytest.fixture
def caller(service):
    with connected(service.address) as caller:
        yield caller


@pytest.fixture
def name():
    """Return the name of a namespace that no other test uses."""
    return f"test-{next(numbers)}"


@contextmanager
def replica_of(service, name, **settings):
    """Yield a client whose copy is current."""
    with ReplicaClient(service.address, namespace=name, **settings) as client:
        eventually(lambda: client.copy.corpus)
        yield client


def drafts(client, first, limit=4):
    """Return the draft after the beginning of `counted(first)`."""
    sequence_id = next(numbers)
    client.start(sequence_id, array(counted(first)[:8]), learn=False)
    tokens = client.draft(progress_of({sequence_id: []}, limit)).tokens.tolist()
    client.finish(sequence_id, array([]), learn=False)
    return tokens


def has(client, first):
    """Return whether the copy drafts `counted(first)`."""
    return drafts(client, first) == counted(first)[8:12]


def texts_of(corpus):
    """Return hashes of names with times."""
    return corpus.request_times()


def test_a_copy_has_what_was_learned_before_and_after_it_began(service, caller, name):
    caller.observe(name, counted(100), names=["before"])
    with replica_of(service, name) as client:
        eventually(lambda: has(client, 100))
        caller.observe(name, counted(300), counted(500), names=["after", "later"])
        eventually(lambda: has(client, 300) and has(client, 500))
        assert set(texts_of(client.copy.corpus)) == {hash_of(each) for each in ("before", "after", "later")}
        assert client.copy.snapshots == 1


def test_drafts_equal_those_of_an_embedded_drafter(service, caller, name):
    other = array([token + 7 for token in TEXT])
    caller.observe(name, TEXT.tolist(), names=["text"])
    with replica_of(service, name) as client:
        eventually(lambda: client.copy.corpus.indexed >= len(TEXT))
        own = drafter_of([TEXT], capacity=100_000)
        for prompt, output in ((TEXT[:50], TEXT[50:]), (other[:50], other[50:])):
            pairs = [list(replayed(drafter, 1, prompt, output, learn=False)) for drafter in (client, own)]
            assert [step[0].tokens.tolist() for step in pairs[0]] == [step[0].tokens.tolist() for step in pairs[1]]


def test_what_is_produced_comes_back_from_the_service(service, caller, name):
    with replica_of(service, name) as client, replica_of(service, name) as other:
        assert replay_one(client, 1, TEXT[:50], TEXT[50:]) > 200
        for each in (client, other):
            eventually(lambda each=each: replay_one(each, next(numbers), TEXT[:50], TEXT[50:], learn=False) <= 20)

        def sizes():
            [listed] = [row for row in caller.call("ListNamespaces").namespaces if row.name == name]
            return {listed.tokens, client.copy.corpus.tokens, other.copy.corpus.tokens}

        eventually(lambda: len(sizes()) == 1 and sizes() != {0})


def test_forgotten_text_is_not_offered(service, caller, name):
    caller.observe(name, counted(100), counted(300), counted(500), names=["one", "two", "three"])
    with replica_of(service, name) as client:
        eventually(lambda: has(client, 100) and has(client, 300))
        caller.call("Forget", namespace=name, request_id="one")
        eventually(lambda: not has(client, 100))
        assert has(client, 300)
        client.forget("two")
        assert not has(client, 300)
        caller.call("Forget", namespace=name, everything=True)
        eventually(lambda: not has(client, 500))
        caller.observe(name, counted(100), names=["one"])
        eventually(lambda: has(client, 100))


def test_running_text_of_a_forgotten_name_is_not_offered_to_others(service, caller, name):
    with replica_of(service, name) as client:
        client.start(1, array(counted(100)[:8]), request_id="mine")
        client.start(2, array(counted(900)[:8]))
        client.draft(progress_of({1: counted(100)[8:30], 2: []}, 4))
        eventually(lambda: has(client, 100))
        caller.call("Forget", namespace=name, request_id="mine")
        eventually(lambda: not has(client, 100))


def test_running_sequences_go_on_with_a_new_copy(service, caller, name):
    with ReplicaClient(service.address, namespace=name) as client:
        caller.observe(name, counted(100), names=["text"])
        client.start(1, array(counted(100)[:8]), learn=False)
        eventually(lambda: client.draft(progress_of({1: []}, 4)).tokens.tolist() == counted(100)[8:12])
        assert client.draft(progress_of({1: counted(100)[8:10]}, 4)).tokens.tolist() == counted(100)[10:14]
        client.finish(1, array(counted(100)[10:12]), learn=False)


def test_a_deleted_namespace_is_deleted_here(service, caller, name):
    caller.observe(name, counted(100), names=["text"])
    with replica_of(service, name) as client:
        eventually(lambda: has(client, 100))
        caller.call("DropNamespace", namespace=name)
        eventually(lambda: not has(client, 100))
        eventually(lambda: client.copy.corpus is not None and client.copy.corpus.tokens == 0)


def test_of_a_larger_corpus_the_newest_text_is_held(service, caller, name):
    caller.observe(name, *(counted(1000 * first, 900) for first in range(1, 300)))
    with replica_of(service, name, max_tokens=20_000) as client:
        assert client.copy.corpus.capacity == 20_000
        eventually(lambda: has(client, 299_000))
        assert not has(client, 1000)


def test_a_copy_catches_up_after_a_break(service, caller, name, monkeypatch):
    monkeypatch.setattr(replica_module, "LONGEST_PAUSE_S", 0.0)
    caller.observe(name, counted(100), counted(300), names=["one", "two"])
    with replica_of(service, name) as client:
        eventually(lambda: has(client, 100))
        for first, forgotten in ((500, "one"), (700, "two")):
            client._follower._call.cancel()
            caller.observe(name, counted(first), names=[str(first)])
            caller.call("Forget", namespace=name, request_id=forgotten)
            eventually(lambda first=first: has(client, first))
            eventually(lambda forgotten=forgotten: hash_of(forgotten) not in texts_of(client.copy.corpus))
        assert not has(client, 100)
        assert client.copy.snapshots == 1


def test_a_copy_without_news_is_trusted_for_a_limited_time(socket_address, monkeypatch):
    monkeypatch.setattr(replica_module, "TRUSTED_S", 3.0)
    with served("--listen", socket_address, "--capacity", "100k") as process, connected(socket_address) as caller:
        caller.observe("own", counted(100), names=["text"])
        with replica_of(SimpleNamespace(address=socket_address), "own") as client:
            eventually(lambda: has(client, 100))
            process.send_signal(signal.SIGSTOP)
            try:
                assert has(client, 100)  # A service that does not answer costs nothing at first.
                eventually(lambda: not has(client, 100))
            finally:
                process.send_signal(signal.SIGCONT)
            eventually(lambda: has(client, 100))


def test_a_restarted_service_sends_a_new_copy(tmp_path, socket_address):
    arguments = ("--listen", socket_address, "--capacity", "100k", "--snapshot-folder", str(tmp_path / "snapshots"))
    with served(*arguments), connected(socket_address) as caller:
        caller.observe("own", counted(100), counted(300), names=["one", "two"])
        client = ReplicaClient(socket_address, namespace="own")
        eventually(lambda: has(client, 100))
    assert has(client, 300)
    with served(*arguments), connected(socket_address) as caller:
        caller.call("Forget", namespace="own", request_id="one")
        eventually(lambda: client.copy.snapshots == 2)
        assert not has(client, 100)
        assert has(client, 300)
        client.close()


def test_an_engine_that_drafts_all_the_time_gets_its_copy_back(socket_address, monkeypatch):
    monkeypatch.setattr(replica_module, "TRUSTED_S", 0.5)
    monkeypatch.setattr(replica_module, "SILENCE_S", 5.0)
    arguments = ("--listen", socket_address, "--capacity", "100k")
    with served(*arguments):
        client = ReplicaClient(socket_address, namespace="own")
        eventually(lambda: client.copy.corpus)
    eventually(lambda: client.copy.corpus is None)
    with served(*arguments), connected(socket_address) as caller:
        caller.observe("own", counted(100), names=["text"])
        eventually(lambda: has(client, 100))
        client.close()


def test_a_missing_service_is_an_error(socket_address):
    with pytest.raises(UserError, match="no drafter answers at"):
        ReplicaClient(socket_address)
    with ReplicaClient(socket_address, required=False) as client:
        assert drafts(client, 100) == []


@pytest.mark.parametrize("vocab_size", [0, 200])
def test_damaged_snapshots_and_other_vocabularies_are_refused(tmp_path, vocab_size):
    corpus = Corpus(100_000, DrafterConfig().match_depth)
    corpus.append(array(counted(300)), "text")
    snapshot.save(corpus, tmp_path / "corpus.ssd")
    data = (tmp_path / "corpus.ssd").read_bytes()
    copy = Copy(pb.FollowRequest(model=pb.Model(vocab_size=vocab_size)), DrafterConfig(), 1 << 20)
    parts = [data] if vocab_size else [data[:5000], data[:-5000], data[:5000] + data[5001:]]
    for part in parts:
        with pytest.raises(SnapshotError):
            copy.receive(pb.FollowResponse(snapshot=part, position=1, is_current=True), 0.0)
        copy.drop_parts()
        assert copy.corpus is None
    with pytest.raises(WireError):
        copy.receive(pb.FollowResponse(changes=[pb.Change(forgotten="text")], position=1), 0.0)


def test_a_copy_is_deleted_with_the_right_to_read(tmp_path, socket_address):
    callers, token = tmp_path / "callers.toml", tmp_path / "token"
    token.write_text("engine")
    entries = [caller_entry("engine", "own", "read"), caller_entry("admin", "*", "read", "learn", "admin")]
    callers.write_text("".join(entries))
    os.chmod(callers, 0o600)
    with (
        served("--listen", socket_address, "--capacity", "100k", "--callers", str(callers)),
        connected(socket_address, (("authorization", "Bearer admin"),)) as caller,
    ):
        caller.observe("own", counted(100), names=["text"])
        access = ClientAccess(token=token)
        with replica_of(SimpleNamespace(address=socket_address), "own", access=access) as client:
            eventually(lambda: has(client, 100))
            callers.write_text(entries[1])
            eventually(lambda: not has(client, 100))
            assert client.copy.corpus is None


def test_counts_of_drafts_are_in_the_report(service, caller, name, monkeypatch):
    monkeypatch.setattr(replica_module, "COUNTED_S", 0.0)
    caller.observe(name, TEXT.tolist(), names=["text"])
    with replica_of(service, name) as client:
        eventually(lambda: client.copy.corpus.indexed >= len(TEXT))
        steps = replay_one(client, 1, TEXT[:50], TEXT[50:], learn=False)
        eventually(lambda: json.loads(caller.call("Report", namespace=name).json)["namespaces"][0]["drafting"]["hits"])
    report = json.loads(caller.call("Report", namespace=name).json)["namespaces"][0]
    assert report["drafting"]["committed"] == len(TEXT) - 50
    assert report["drafting"]["accepted"] >= len(TEXT) - 50 - steps


OPERATIONS = st.tuples(
    st.sampled_from(["learn", "learn", "forget", "forget all", "break", "wait", "wait long", "reload", "nothing"]),
    st.integers(0, 1),
    st.sampled_from([0, 1, 9]),
)
"""What happens, to which text, and how many responses the copy gets afterwards."""


class Feeding:
    """A namespace and a copy of it, which receives one response at a time."""

    def __init__(self):
        self.now = 0.0
        self.copy = Copy(pb.FollowRequest(), DrafterConfig(), 1 << 20, lambda: self.now)
        self.forgotten_at = {}
        self.open()

    def open(self):
        config = DrafterConfig(capacity=100_000)
        self.namespace = Namespace("own", ModelIdentity(), config, Corpus.from_config(config))
        self.namespace.feed = feed.Feed(lambda: self.now)
        self.known, self.stream, self.called_at = {}, None, 0.0

    async def close(self):
        await self.end_stream()
        self.namespace.corpus.close()

    async def end_stream(self):
        if self.stream is not None:
            await self.stream.aclose()
        self.stream = None
        self.copy.drop_parts()

    async def receive(self):
        request = self.copy.request()
        if self.stream is None:
            self.called_at = self.now
            self.stream = self.namespace.feed.responses("own", self.namespace.corpus, request.copy, request.position)
        self.copy.receive(await anext(self.stream), self.called_at)

    async def do(self, what, number):
        if what == "learn":
            self.namespace.learn(array(counted(100 * number)), f"{number}")
            self.known[number] = self.forgotten_at.pop(number, None)
        elif what == "forget":
            self.namespace.forget(f"{number}")
            self.forget(number)
        elif what == "forget all":
            self.namespace.forget_before(math.inf)
            for each in [*self.known]:
                self.forget(each)
        elif what == "break":
            await self.end_stream()
        elif what in ("wait", "wait long"):
            self.now += replica_module.TRUSTED_S * (0.3 if what == "wait" else 1.1)
        elif what == "reload":
            await self.close()
            for each in [*self.known]:
                self.forget(each)
            self.open()

    def forget(self, number):
        if number in self.known:
            del self.known[number]
            self.forgotten_at[number] = self.now

    def check(self):
        """Check that no text is in the copy that was forgotten longer than `TRUSTED_S` ago."""
        if (corpus := self.copy.corpus) is not None:
            corpus.refresh()
            held = corpus.request_times()
            for number, moment in self.forgotten_at.items():
                assert hash_of(f"{number}") not in held or self.now - moment <= replica_module.TRUSTED_S

    async def check_end(self):
        """Check that the copy equals the namespace once it has received everything."""
        await self.receive()
        while self.copy.request().copy != self.namespace.feed.copy or not self.copy.corpus:
            await self.receive()
        while self.copy.position < self.namespace.feed.end:
            await self.receive()
        for corpus in (self.copy.corpus, self.namespace.corpus):
            corpus.refresh()
        assert set(self.copy.corpus.request_times()) == {hash_of(f"{number}") for number in self.known}


@settings(max_examples=60)
@example([("learn", 0, 9), ("forget", 0, 0), ("wait long", 0, 0)], 1 << 16)
@given(st.lists(OPERATIONS, max_size=20), st.sampled_from([2, 1 << 16]))
def test_forgotten_text_is_never_offered_longer_than_stated(operations, kept):
    async def run():
        feeding = Feeding()
        try:
            for what, number, responses in operations:
                await feeding.do(what, number)
                for _ in range(responses):
                    await feeding.receive()
                feeding.check()
            await feeding.check_end()
        finally:
            await feeding.close()
            feeding.copy.replace(None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed, "SIGN_OF_LIFE_S", 0.0)
        patch.setattr(feed, "KEPT_CHANGES", kept)
        patch.setattr(feed, "PART_BYTES", 1 << 18)
        asyncio.run(run())


def test_shadow_mode_needs_the_service(service, name):
    with pytest.raises(ValueError, match="shadow"):
        ReplicaClient(service.address, namespace=name, shadow=True)


def test_requests_to_follow_are_checked(service, caller):
    for fields, status in (
        ({"protocol": 2}, "FAILED_PRECONDITION"),
        ({"protocol": 3, "namespace": "/"}, "INVALID_ARGUMENT"),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            next(iter(caller.call("Follow", **fields)))
        assert refused.value.code().name == status
