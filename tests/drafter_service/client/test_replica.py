"""Drafting from a copy of the service's corpus, against the real server."""

import asyncio
import errno
import itertools
import json
import math
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drafter_service.auth.connector import ClientAccess
from drafter_service.client import copies, replica
from drafter_service.client.client import DrafterClient
from drafter_service.client.copies import Copy, Follower
from drafter_service.client.replica import ReplicaClient
from drafter_service.observability.facts import ModelIdentity
from drafter_service.server import feed
from drafter_service.server.namespace import Namespace
from drafter_service.settings.tree import AccessConfig, NamespacesConfig, SnapshotsConfig
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import WireError, pack
from ssd.config import DrafterConfig
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus
from ssd.corpus.requests import hash_of
from ssd.corpus.ring import MAX_CAPACITY
from ssd.corpus.sections import SnapshotError
from ssd.errors import UserError
from tests.drafter_service.fake_server import TIMEOUT_S, FakeService, fake_server_thread
from tests.drafter_service.guarded import caller_entry
from tests.drafter_service.raw import connected, counted, eventually
from tests.drafter_service.server.opened_namespaces import raising
from tests.replay import drafter_of, progress_of, replay_one, replayed
from tests.servers import served, serving
from tests.ssd.test_drafter import TEXT
from tests.strategies import array

numbers = itertools.count()


@pytest.fixture(scope="module")
def service():
    """Yield a server that no test stops, with a snapshot folder, and a namespace that reads a library."""
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        address = f"unix:{folder}/drafter.sock"
        settings = {
            "drafting": DrafterConfig(capacity=400_000),
            "snapshots": SnapshotsConfig(Path(folder) / "snapshots"),
        }
        with serving(listen=address, namespaces=NamespacesConfig(reads={"own": ("library",)}), **settings):
            yield SimpleNamespace(address=address)


@pytest.fixture
def caller(service):
    with connected(service.address) as caller:
        yield caller


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


def report_of(caller, name):
    return json.loads(caller.call("Report", namespace=name).json)["namespaces"][0]


def has(client, first):
    """Return whether the copy drafts `counted(first)`."""
    return drafts(client, first) == counted(first)[8:12]


def test_drafts_equal_those_of_an_embedded_drafter(service, caller, name):
    other = array([token + 7 for token in TEXT])
    caller.observe(name, TEXT.tolist(), names=["text"])
    with replica_of(service, name) as client:
        eventually(lambda: client.copy.corpus.indexed >= len(TEXT))
        own = drafter_of([TEXT], capacity=100_000)
        for prompt, output in ((TEXT[:50], TEXT[50:]), (other[:50], other[50:])):
            pairs = [list(replayed(drafter, 1, prompt, output, learn=False)) for drafter in (client, own)]
            assert [step[0].tokens.tolist() for step in pairs[0]] == [step[0].tokens.tolist() for step in pairs[1]]


def test_produced_text_comes_back_from_the_service(service, caller, name):
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


def snapshot_data(folder, name="text"):
    """Return the bytes of a snapshot with a text of this name."""
    corpus = Corpus(100_000, DrafterConfig().match_depth)
    corpus.append(array(counted(300)), name)
    snapshot.save(corpus, folder / "corpus.ssd")
    return (folder / "corpus.ssd").read_bytes()


def test_a_snapshot_is_used_once_it_has_what_was_forgotten_before(tmp_path):
    copy = Copy(pb.FollowRequest(), DrafterConfig(), 1 << 20, lambda: 5.0)
    positions = itertools.count(1)

    def texts_after(seconds, **fields):
        response = pb.FollowResponse(position=next(positions), is_current=True, seconds=seconds, **fields)
        copy.receive(response, 0.0)
        if copy.corpus is None:
            return None
        copy.corpus.refresh()
        return {*copy.corpus.request_times()}

    text, other = hash_of("text"), hash_of("other")
    assert texts_after(1.0, snapshot=snapshot_data(tmp_path)) == {text}
    with copy.forgetting("text"):
        assert copy.corpus.request_times() == {}
    assert texts_after(4.0, snapshot=snapshot_data(tmp_path)) is None
    assert texts_after(5.0, changes=[pb.Change(forgotten="text")]) == set()
    with copy.forgetting("text"):
        assert texts_after(5.0, snapshot=snapshot_data(tmp_path, "other")) is None
    # That snapshot is newer, so no change follows that forgets the name.
    finished = pb.FinishedText(request_id="text", tokens=pack(array(counted(100)), "u4"), time=1.0)
    assert texts_after(5.0, changes=[pb.Change(finished=finished)]) == {text, other}
    copy.replace(None)


def test_text_that_arrives_before_the_change_that_forgets_it_is_not_offered(service, name, monkeypatch):
    monkeypatch.setattr(replica, "SENT_AFTER_S", 3600)
    has_returned, may_forget, applied = threading.Event(), threading.Event(), []
    with replica_of(service, name) as client:
        apply = client.copy._apply

        def apply_later(changes):
            has_returned.wait(TIMEOUT_S)
            for change in changes:
                if change.WhichOneof("what") == "forgotten":
                    may_forget.wait(TIMEOUT_S)
                apply([change])
                applied.append(change.WhichOneof("what"))

        monkeypatch.setattr(client.copy, "_apply", apply_later)
        client.start(1, array(counted(100)[:8]), request_id="mine")
        client.finish(1, array(counted(100)[8:]))
        client.forget("mine")
        has_returned.set()
        eventually(lambda: applied == ["finished"])
        client.copy.corpus.refresh()
        assert not has(client, 100)
        may_forget.set()
        eventually(lambda: len(applied) == 2)
        client.start(1, array(counted(300)[:8]), request_id="mine")
        client.finish(1, array(counted(300)[8:]))
        client._send_finished()
        eventually(lambda: has(client, 300))


def test_text_of_a_name_that_the_service_did_not_forget_is_learned(service, name, monkeypatch):
    with replica_of(service, name) as client:
        monkeypatch.setattr(DrafterClient, "forget", raising(UserError("the service is away")))
        with pytest.raises(UserError):
            client.forget("mine")
        client.start(1, array(counted(100)[:8]), request_id="mine")
        client.finish(1, array(counted(100)[8:]))
        eventually(lambda: has(client, 100))


def test_running_text_of_a_forgotten_name_is_not_offered_to_others(service, caller, name):
    with replica_of(service, name) as client:
        mine, other = next(numbers), next(numbers)
        client.start(mine, array(counted(100)[:8]), request_id="mine")
        client.start(other, array(counted(900)[:8]))
        client.draft(progress_of({mine: counted(100)[8:30], other: []}, 4))
        assert has(client, 100)
        caller.call("Forget", namespace=name, request_id="mine")
        eventually(lambda: not has(client, 100))


@pytest.mark.parametrize("is_following", [True, False])
def test_text_of_a_name_that_was_forgotten_while_it_ran_is_not_learned(service, caller, name, is_following):
    with replica_of(service, name) as client:
        client.start(1, array(counted(100)[:8]), request_id="mine")
        client.draft(progress_of({1: counted(100)[8:30]}, 4))
        if not is_following:
            client._followers[""].close()
        caller.call("Forget", namespace=name, request_id="mine")
        client.finish(1, array(counted(100)[30:]))
        client.start(2, array(counted(500)[:8]), request_id="mine")
        client.finish(2, array(counted(500)[8:]))
        eventually(lambda: caller.probe(name, counted(500)[:8]))
        assert caller.probe(name, counted(100)[:8]) == []


def test_finished_sequences_are_sent_several_in_a_message_and_before_one_is_forgotten(service, name, monkeypatch):
    monkeypatch.setattr(replica, "SENT_AFTER_S", 3600)
    with replica_of(service, name) as client, replica_of(service, name) as other:
        pending, sent = client._protocol.pending, []
        send = pending._send
        monkeypatch.setattr(pending, "_send", lambda data: (sent.append(data), send(data)))
        for first in (100, 300, 500):
            client.start(first, array(counted(first)[:8]), request_id=f"{first}")
            client.finish(first, array(counted(first)[8:]))
        assert sent == []
        client.forget("300")
        assert [start.request_id for start in pb.DraftRequest.FromString(sent[0]).starts] == ["100", "300", "500"]
        eventually(lambda: has(other, 500))
        assert has(other, 100)
        eventually(lambda: not has(other, 300))


def test_what_finished_last_is_learned_when_the_client_is_closed(service, caller, name, monkeypatch):
    monkeypatch.setattr(replica, "SENT_AFTER_S", 3600)
    with ReplicaClient(service.address, namespace=name) as client:
        client.start(1, array(counted(100)[:8]))
        client.finish(1, array(counted(100)[8:]))
    assert eventually(lambda: caller.probe(name, counted(100)[:8]))[:4] == counted(100)[8:12]


def test_output_outside_of_the_vocabulary_is_refused_when_it_ends(service, name):
    model = ModelIdentity(vocab_size=50)
    with ReplicaClient(service.address, namespace=name, model=model) as client:
        client.start(1, array([1, 2]))
        with pytest.raises(ValueError, match="outside the vocabulary of 50"):
            client.finish(1, array([50]))
        client.finish(1, array([49]))


def test_one_text_outside_of_the_vocabulary_of_the_namespace_does_not_stop_the_others(service, caller, name):
    caller.stream(name, vocab_size=1000)
    with replica_of(service, name) as client:
        for first in (100, 5000, 300):
            sequence_id = next(numbers)
            client.start(sequence_id, array(counted(first)[:8]))
            client.finish(sequence_id, array(counted(first)[8:]))
        eventually(lambda: has(client, 100) and has(client, 300))
        assert (client.counters.unlearned, client.counters.reconnects) == (1, 0)


def test_a_service_that_sends_no_copy_still_limits_the_length_of_drafts(socket_address):
    repeated, lost = 3 * counted(100), []
    with (
        fake_server_thread(socket_address, FakeService(max_draft=3)),
        ReplicaClient(socket_address, on_copy_lost=lost.append) as client,
    ):
        client.start(1, array(repeated))
        assert len(client.draft(progress_of({1: []}, 8)).tokens) == 3
        assert len(client.propose(repeated).tokens) == 3
        client.finish(1, array([5]))
        assert 'set "drafting" to "sidecar"' in eventually(lambda: lost)[0]


@pytest.mark.parametrize("kind", [DrafterClient, ReplicaClient])
def test_an_engine_goes_on_after_on_lost_has_closed_its_client(socket_address, kind):
    def close(_):
        client.close()
        closed.set()

    closed = threading.Event()
    with (
        fake_server_thread(socket_address, FakeService()) as fake,
        kind(socket_address, on_lost=close) as client,
    ):
        client.start(1, array([5]))
        client.draft(progress_of({1: [6]}, 4))
        fake.cut()
        assert closed.wait(TIMEOUT_S)
        assert client.draft(progress_of({1: [7]}, 4)).tokens.tolist() == []
        client.start(2, array(range(5000)))
        assert client.propose([9000]).tokens.tolist() == []
        for number in (1, 2):
            client.finish(number, array([8]))
        with pytest.raises(ValueError, match="sequence 1 was not started"):
            client.finish(1, array([]))


def test_a_closed_client_keeps_no_finished_text_and_follows_no_library(socket_address):
    client = ReplicaClient(socket_address, required=False)
    client.close()
    client.copy.libraries = ["library"]
    client.start(1, array([5]))
    client.finish(1, array([6]))
    assert not client._finished
    follower = client._followers["library"]._threads[0]
    follower.join(TIMEOUT_S)
    assert not follower.is_alive()


def test_closing_ends_the_sender_while_another_thread_sends(socket_address):
    class Waited(threading.Event):
        def __init__(self):
            super().__init__()
            self.is_awaited, self.may_wait, self.was_set = (threading.Event() for _ in range(3))

        def wait(self, timeout=None):
            self.is_awaited.set()
            self.may_wait.wait(TIMEOUT_S)
            return super().wait(timeout)

        def set(self):
            super().set()
            self.was_set.set()

    with ReplicaClient(socket_address, required=False) as client:
        before, client._has_finished = client._has_finished, Waited()
        before.set()
        assert client._has_finished.is_awaited.wait(TIMEOUT_S)
        closing = threading.Thread(target=client._stop_sender)
        closing.start()
        assert client._has_finished.was_set.wait(TIMEOUT_S)
        client._send_finished()
        client._has_finished.may_wait.set()
        closing.join(TIMEOUT_S / 4)
        is_stuck = closing.is_alive()
        client._has_finished.set()
        assert not is_stuck


class StatusError(grpc.RpcError):
    """The end of a call."""

    def __init__(self, code, details=""):
        self.code, self.details = lambda: code, lambda: details


@contextmanager
def followed(monkeypatch, streams):
    """Yield a copy and the reasons that its follower reports, once it has read these streams of responses, exceptions,
    and functions that are called with the copy.
    """
    has_read, reported = threading.Event(), []
    calls = iter(streams)

    class Call:
        def __init__(self):
            self._items, self._is_cancelled = next(calls, None), threading.Event()

        def cancel(self):
            self._is_cancelled.set()

        def __iter__(self):
            if self._items is None:
                has_read.set()
                self._is_cancelled.wait(TIMEOUT_S)
            for item in self._items or ():
                if isinstance(item, Exception):
                    raise item
                if callable(item):
                    item(copy)
                else:
                    yield item

    stub = SimpleNamespace(Follow=lambda *_, **__: Call())
    monkeypatch.setattr(copies.drafter_pb2_grpc, "DrafterServiceStub", lambda _: stub)
    connector = SimpleNamespace(open=lambda _: nullcontext(), metadata=lambda: (), address=SimpleNamespace(text="here"))
    copy = Copy(pb.FollowRequest(), DrafterConfig(), 1 << 20)
    follower = Follower(connector, copy, reported.append)
    try:
        assert has_read.wait(TIMEOUT_S)
        yield copy, [reason.removeprefix("no copy of the corpus from the drafter at here: ") for reason in reported]
    finally:
        follower.close()


AWAY = StatusError(grpc.StatusCode.UNAVAILABLE)
CURRENT = pb.FollowResponse(position=0, is_current=True)


def test_each_reason_for_which_there_is_no_copy_is_reported_once(monkeypatch):
    monkeypatch.setattr(copies, "FIRST_PAUSE_S", 0.0)
    refused, full = (
        StatusError(code, code.name)
        for code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED)
    )
    ends = [AWAY, refused, AWAY, refused, full, full]
    with followed(monkeypatch, [*([end] for end in ends), [CURRENT, AWAY], [full]]) as (_, reported):
        assert reported == ["FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"]


def test_a_service_that_was_reached_is_called_again_soon(monkeypatch):
    monkeypatch.setattr(copies, "LONGEST_PAUSE_S", 10 * TIMEOUT_S)
    monkeypatch.setattr(copies, "FIRST_PAUSE_S", 0.001)
    with followed(monkeypatch, 30 * [[CURRENT, AWAY]]) as (_, reported):
        assert reported == []


def test_a_copy_that_cannot_be_erased_is_closed_and_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(copies, "FIRST_PAUSE_S", 0.0)
    loaded = pb.FollowResponse(snapshot=snapshot_data(tmp_path), position=1, is_current=True)
    withdrawn = []

    def fill_memory(copy):
        withdrawn.append(copy.corpus)
        copy.corpus.refresh = raising(MemoryError())

    with followed(monkeypatch, [[loaded, fill_memory, MemoryError()], [loaded]]) as (copy, reported):
        assert reported == ["MemoryError"]
        assert withdrawn[0]._maintainer is None
        assert copy.snapshots == 2


def test_a_failure_to_withdraw_a_copy_is_reported_and_not_the_end(monkeypatch):
    monkeypatch.setattr(copies, "FIRST_PAUSE_S", 0.0)

    def break_copy(copy):
        copy.replace = raising(MemoryError())

    def repair_copy(copy):
        del copy.replace

    refused = StatusError(grpc.StatusCode.ABORTED)
    with followed(monkeypatch, [[break_copy, refused], [repair_copy, CURRENT]]) as (_, reported):
        assert reported == ["MemoryError"]


def test_parts_that_cannot_be_written_are_dropped(monkeypatch):
    copy = Copy(pb.FollowRequest(), DrafterConfig(), 1 << 20)
    fail = raising(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(copies.tempfile, "TemporaryFile", lambda: SimpleNamespace(write=fail, close=fail))
    with pytest.raises(OSError, match="No space"):
        copy.receive(pb.FollowResponse(snapshot=b"part"), 0.0)
    copy.drop_parts()
    copy.drop_parts()


def test_running_sequences_go_on_with_a_new_copy_until_the_namespace_is_deleted(service, caller, name):
    with ReplicaClient(service.address, namespace=name) as client:
        caller.observe(name, counted(100), names=["text"])
        client.start(1, array(counted(100)[:8]), learn=False)
        eventually(lambda: client.draft(progress_of({1: []}, 4)).tokens.tolist() == counted(100)[8:12])
        assert client.draft(progress_of({1: counted(100)[8:10]}, 4)).tokens.tolist() == counted(100)[10:14]
        client.finish(1, array(counted(100)[10:12]), learn=False)
        caller.call("DropNamespace", namespace=name)
        eventually(lambda: not has(client, 100))
        eventually(lambda: client.copy.corpus is not None and client.copy.corpus.tokens == 0)


def test_clients_that_connect_at_once_share_a_snapshot(monkeypatch):
    written, save, may_write = [], snapshot.save, threading.Event()

    def counting_save(corpus, path, **options):
        written.append(options["max_tokens"])
        may_write.wait(TIMEOUT_S)
        return save(corpus, path, **options)

    async def first_copy(namespace, most):
        stream = namespace.feed.responses(namespace.corpus, feed.CopyStream("own", "", 0, most, "", []))
        copy = Copy(pb.FollowRequest(), DrafterConfig(), 1 << 20)
        while copy.corpus is None:
            copy.receive(await anext(stream), time.monotonic())
        await stream.aclose()
        return copy

    async def run():
        config = DrafterConfig(capacity=100_000)
        namespace = Namespace("own", ModelIdentity(), config, Corpus.from_config(config))
        for number in range(1, 30):
            namespace.learn(array(counted(1000 * number, 900)), f"{number}")
        loading = [asyncio.ensure_future(first_copy(namespace, most)) for most in (50_000, 50_000, 8_000, 8_000)]
        while len(written) < 1:
            await asyncio.sleep(0)
        namespace.learn(array(counted(100)), "late")
        may_write.set()
        held = [len((await copy).corpus.request_times()) for copy in loading]
        assert not namespace.feed._savings
        namespace.corpus.close()
        return held

    monkeypatch.setattr(snapshot, "save", counting_save)
    assert asyncio.run(run()) == [30, 30, 10, 10]
    assert sorted(written) == [8_000, 50_000]


def test_a_copy_is_used_as_soon_as_it_is_loaded(monkeypatch):
    """The service says that the copy is complete without waiting for a change or for the next sign of life."""
    monkeypatch.setattr(feed, "SIGN_OF_LIFE_S", 10 * TIMEOUT_S)

    async def run():
        feeding = Feeding()
        await feeding.do("learn", 1)
        async with asyncio.timeout(TIMEOUT_S):
            while feeding.copy.corpus is None:
                await feeding.receive()
        await feeding.close()
        feeding.copy.replace(None)

    asyncio.run(run())


def test_libraries_are_drafted_from(service, caller):
    caller.observe("library", counted(100), names=["one"])
    caller.observe("own", counted(300), names=["two"])
    with replica_of(service, "own") as client:
        eventually(lambda: has(client, 100) and has(client, 300))
        caller.observe("library", counted(500), names=["three"])
        eventually(lambda: has(client, 500))
        caller.call("Forget", namespace="library", request_id="one")
        eventually(lambda: not has(client, 100))
        assert has(client, 300)


def test_of_a_larger_corpus_the_newest_text_is_held_and_reported(service, caller, name):
    caller.observe(name, *(counted(1000 * first, 900) for first in range(1, 60)))
    with replica_of(service, name, max_tokens=20_000, engine="one") as small, replica_of(service, name, engine="two"):
        assert small.copy.corpus.capacity == 20_000
        eventually(lambda: has(small, 59_000))
        assert not has(small, 1000)
        report = report_of(caller, name)
        found = sorted((each["engine"], each["tokens"], each["missing_changes"]) for each in report["copies"])
        assert found == [("one", 20_000, 0), ("two", report["corpus"]["tokens"], 0)]
    eventually(lambda: not report_of(caller, name)["copies"])


def test_a_copy_catches_up_after_a_break(service, caller, name, monkeypatch):
    monkeypatch.setattr(copies, "LONGEST_PAUSE_S", 0.0)
    caller.observe(name, counted(100), counted(300), names=["one", "two"])
    with replica_of(service, name) as client:
        eventually(lambda: has(client, 100))
        for first, forgotten in ((500, "one"), (700, "two")):
            client._followers[""]._call.cancel()
            caller.observe(name, counted(first), names=[str(first)])
            caller.call("Forget", namespace=name, request_id=forgotten)
            eventually(lambda first=first: has(client, first))
            eventually(lambda forgotten=forgotten: hash_of(forgotten) not in client.copy.corpus.request_times())
        assert not has(client, 100)
        assert client.copy.snapshots == 1


def test_copies_outlive_a_service_that_stalls_and_equal_one_that_was_killed(tmp_path, socket_address, monkeypatch):
    """Two engines produce texts, and forget some, before the service is killed, while it is away, and after it."""
    arguments = ("--listen", socket_address, "--capacity", "100k", "--snapshot-folder", str(tmp_path))
    names, forgotten = (f"text-{number}" for number in itertools.count()), set()

    def produce(client, texts):
        for name in itertools.islice(names, texts):
            text = counted(1000 * next(numbers))
            client.start(1, array(text[:8]), request_id=name)
            client.draft(progress_of({1: text[8:20]}, 4))
            client.finish(1, array(text[20:]))

    def forget(client, name):
        client.forget(name)
        forgotten.add(hash_of(name))

    with ExitStack() as stack:
        with served(*arguments) as process, connected(socket_address) as caller:
            caller.observe("own", counted(100), counted(300), names=["one", "two"])
            caller.call("Snapshot", namespace="own")
            clients = [stack.enter_context(ReplicaClient(socket_address, namespace="own")) for _ in range(2)]
            eventually(lambda: all(has(client, 100) for client in clients))
            process.send_signal(signal.SIGSTOP)
            try:
                assert has(clients[0], 100)  # A service that does not answer costs nothing at first.
                monkeypatch.setattr(copies, "TRUSTED_S", 1.0)
                eventually(lambda: not has(clients[0], 100))
            finally:
                process.send_signal(signal.SIGCONT)
            eventually(lambda: has(clients[0], 100))
            monkeypatch.undo()
            for client in clients:
                produce(client, 10)
            forget(clients[0], "text-3")
            process.kill()
        for client in clients:
            produce(client, 10)
        assert has(clients[0], 100)
        monkeypatch.setattr(copies, "TRUSTED_S", -1.0)
        assert not has(clients[0], 100), "no longer than it can be trusted"
        monkeypatch.undo()
        with served(*arguments), connected(socket_address) as caller:
            eventually(lambda: clients[1].is_connected)
            forget(clients[1], "one")
            for client in clients:
                produce(client, 10)

            def held():
                """Return the texts of the service and of the copies if they are equal."""
                caller.call("Snapshot", namespace="own")
                found = [{*snapshot.load(tmp_path / "own" / "corpus.ssd").corpus.request_times()}]
                found += [{*client.copy.corpus.request_times()} for client in clients if client.copy.corpus]
                return found[0] if len(found) == 3 and all(each == found[0] for each in found) else None

            late = {hash_of(f"text-{number}") for number in range(20, 60)}
            assert eventually(lambda: (texts := held()) and late < texts and texts).isdisjoint(forgotten)
            assert {client.copy.snapshots for client in clients} == {2}


def test_copies_equal_the_corpus_after_kills():
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        command = [sys.executable, "-m", "tests.drafter_service.killed_replicas", folder, "2", "2"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=10 * TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_missing_service_and_shadow_mode_are_errors(socket_address, monkeypatch):
    monkeypatch.setattr("drafter_service.client.client.CONNECT_TIMEOUT_S", 0.2)
    with pytest.raises(UserError, match="no drafter answers at"):
        ReplicaClient(socket_address)
    with ReplicaClient(socket_address, required=False) as client:
        assert drafts(client, 100) == []
    with pytest.raises(ValueError, match="shadow"):
        ReplicaClient(socket_address, shadow=True)


@pytest.mark.parametrize("vocab_size", [0, 200])
def test_damaged_snapshots_and_other_vocabularies_are_refused(tmp_path, vocab_size):
    data = snapshot_data(tmp_path)
    copy = Copy(pb.FollowRequest(model=pb.Model(vocab_size=vocab_size)), DrafterConfig(), 1 << 20)
    parts = [data] if vocab_size else [data[:5000], data[:-5000], data[:5000] + data[5001:]]
    for part in parts:
        with pytest.raises(SnapshotError):
            copy.receive(pb.FollowResponse(snapshot=part, position=1, is_current=True), 0.0)
        copy.drop_parts()
        assert copy.corpus is None
    with pytest.raises(WireError):
        copy.receive(pb.FollowResponse(changes=[pb.Change(forgotten="text")], position=1), 0.0)


def test_a_copy_is_deleted_with_the_right_to_read(tmp_path, socket_address, monkeypatch):
    monkeypatch.setattr(feed, "SIGN_OF_LIFE_S", 0.1)
    callers, token = tmp_path / "callers.toml", tmp_path / "token"
    token.write_text("engine")
    entries = [caller_entry("engine", "own", "read"), caller_entry("admin", "*", "read", "learn", "admin")]
    callers.write_text("".join(entries))
    settings = {"drafting": DrafterConfig(capacity=100_000), "access": AccessConfig(callers=callers)}
    with (
        serving(listen=socket_address, **settings),
        connected(socket_address, (("authorization", "Bearer admin"),)) as caller,
    ):
        caller.observe("own", counted(100), names=["text"])
        given, lost = {"access": ClientAccess(token=token)}, []
        with replica_of(SimpleNamespace(address=socket_address), "own", on_copy_lost=lost.append, **given) as client:
            eventually(lambda: has(client, 100))
            callers.write_text(entries[1])
            eventually(lambda: not has(client, 100))
            assert client.copy.corpus is None
            assert "the bearer token is not known" in eventually(lambda: lost)[0]


def test_counts_of_drafts_are_in_the_report(service, caller, name, monkeypatch):
    monkeypatch.setattr(replica, "COUNTED_S", 0.01)
    caller.observe(name, TEXT.tolist(), names=["text"])
    with replica_of(service, name) as client:
        eventually(lambda: client.copy.corpus.indexed >= len(TEXT))
        steps = replay_one(client, 1, TEXT[:50], TEXT[50:], learn=False)
        drafting = eventually(lambda: (found := report_of(caller, name)["drafting"])["hits"] and found)
    assert drafting["committed"] == len(TEXT) - 50
    assert drafting["accepted"] >= len(TEXT) - 50 - steps


OPERATIONS = st.tuples(
    st.sampled_from(
        ["learn", "learn", "forget", "forget here", "forget all", "break", "wait", "wait long", "reload", "nothing"]
    ),
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
        self.forgotten_here = set()
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
            state = feed.CopyStream("own", request.copy, request.position, MAX_CAPACITY, "", [])
            self.stream = self.namespace.feed.responses(self.namespace.corpus, state)
        self.copy.receive(await anext(self.stream), self.called_at)

    async def do(self, what, number):
        if what == "learn":
            self.namespace.learn(array(counted(100 * number)), f"{number}")
            self.known[number] = self.forgotten_at.pop(number, None)
            self.forgotten_here.discard(number)
        elif what == "forget here":
            with self.copy.forgetting(f"{number}"):
                self.namespace.forget(f"{number}")
            self.forget(number)
            self.forgotten_here.add(number)
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
            self.now += copies.TRUSTED_S * (0.3 if what == "wait" else 1.1)
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
        """Check that no text is in the copy that was forgotten longer than `TRUSTED_S` ago, or by this client."""
        if (corpus := self.copy.corpus) is not None:
            corpus.refresh()
            held = corpus.request_times()
            assert held.keys().isdisjoint({hash_of(f"{number}") for number in self.forgotten_here})
            for number, moment in self.forgotten_at.items():
                assert hash_of(f"{number}") not in held or self.now - moment <= copies.TRUSTED_S

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
@example([("learn", 0, 9), ("forget", 0, 0), ("wait long", 0, 0)], feed.KEPT_BYTES)
@given(st.lists(OPERATIONS, max_size=20), st.sampled_from([3 * feed.CHANGE_BYTES, feed.KEPT_BYTES]))
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
        patch.setattr(feed, "KEPT_BYTES", kept)
        patch.setattr(feed, "PART_BYTES", 1 << 18)
        asyncio.run(run())


def test_requests_to_follow_are_checked(service, caller):
    for fields, status in (
        ({"protocol": 2}, "FAILED_PRECONDITION"),
        ({"protocol": 3, "namespace": "/"}, "INVALID_ARGUMENT"),
        ({"protocol": 3, "namespace": "own", "match_depth": 9}, "FAILED_PRECONDITION"),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            next(iter(caller.call("Follow", **fields)))
        assert refused.value.code().name == status
