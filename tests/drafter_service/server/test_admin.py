"""The calls other than Draft: learning from other text, forgetting, reports, snapshots, namespaces."""

import asyncio
import itertools
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from drafter_service.auth.callers import AuthorizedCall, PermissionDeniedError, Right
from drafter_service.observability.facts import ModelIdentity
from drafter_service.server.admin import TEXTS_PER_TURN, Admin, learn
from drafter_service.server.namespace import ClosedError
from drafter_service.server.namespaces import Namespaces
from drafter_service.settings.tree import ServiceConfig, SnapshotsConfig
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import pack
from ssd.config import DrafterConfig
from ssd.corpus.sections import SnapshotError
from tests.drafter_service.guarded import run
from tests.drafter_service.raw import batch, connected, counted, eventually, lost, start, texts
from tests.drafter_service.server.opened_namespaces import draft_of, learned, opened, still_namespace
from tests.servers import serving
from tests.strategies import array

INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def service():
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        address, snapshots = f"unix:{folder}/drafter.sock", Path(folder) / "snapshots"
        config = SnapshotsConfig(folder=snapshots)
        with serving(listen=address, drafting=DrafterConfig(capacity=300_000), snapshots=config):
            yield SimpleNamespace(address=address, snapshots=snapshots)


@pytest.fixture
def caller(service):
    with connected(service.address) as caller:
        yield caller


numbers = itertools.count()


def is_on_disk(service, tokens):
    """Return whether a run of tokens is in any file of the snapshot folder."""
    run = pack(array(tokens), "u4")
    return any(run in path.read_bytes() for path in service.snapshots.rglob("*") if path.is_file())


def drafts_of(caller, name, *firsts):
    """Return the draft token after the beginning of each of these texts."""
    return [caller.probe(name, counted(first)[:8], limit=1) for first in firsts]


def test_observed_text_is_learned_once(caller, name):
    response = caller.observe(name, counted(100), counted(200), [], names=["a", "b", "c"])
    assert (response.tokens, response.texts, response.duplicates) == (80, 3, 0)
    response = caller.observe(name, counted(100), counted(300), names=["a", "d"])
    assert (response.tokens, response.texts, response.duplicates) == (40, 1, 1)
    assert caller.observe(name).texts == 0
    eventually(lambda: drafts_of(caller, name, 100, 200, 300) == [[108], [208], [308]])


def test_only_the_end_of_a_prompt_is_learned():
    config = replace(DRAFTING, learned_prompt_tokens=3)
    with still_namespace(config) as namespace:
        message, total = texts(counted(0), counted(100), counted(200), names=["a", "b", "c"]), pb.ObserveResponse()
        message.prompt_lengths = pack(array([30, 2, 40]), "u4")
        asyncio.run(learn(namespace, message, total))
        assert total == pb.ObserveResponse(tokens=13 + 40 + 3, texts=3)
        namespace.corpus.refresh()
        [*drafts] = (draft_of(namespace, context, limit=1) for context in ([25, 26], [27, 28], [100, 101], [237, 238]))
        assert drafts == [[], [29], [102], [239]]


def test_texts_outside_the_vocabulary_are_refused_without_effect(caller, name):
    caller.stream(name, vocab_size=150)
    code, message = caller.refusal("Observe", namespace=name, texts=texts(counted(1), counted(120)))
    assert code is INVALID_ARGUMENT
    assert "texts.tokens holds the id 159; the vocabulary has 150 tokens" in message
    code, message = caller.refusal("Observe", namespace=name, model=pb.Model(vocab_size=200), texts=texts([1]))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert caller.observe(name, counted(1)).tokens == 40


@pytest.mark.parametrize("what", [{"request_id": "b"}, {"older_than_s": 0.0}, {"everything": True}])
def test_forgotten_text_is_not_drafted_and_not_on_disk(service, caller, name, what):
    first = 1000 * next(numbers)
    caller.observe(name, counted(first), counted(first + 100), names=["a", "b"])
    eventually(lambda: drafts_of(caller, name, first, first + 100) == [[first + 8], [first + 108]])
    caller.call("Snapshot", namespace=name)
    assert is_on_disk(service, counted(first + 100))
    answer = caller.call("Forget", namespace=name, **what)
    assert (answer.snapshot_saved, answer.texts, answer.is_shared) == (True, 1 if "request_id" in what else 2, False)
    again = caller.call("Forget", namespace=name, **what)
    assert again.texts == 0
    kept = [[first + 8]] if "request_id" in what else [[]]
    assert drafts_of(caller, name, first, first + 100) == [*kept, []]
    assert not is_on_disk(service, counted(first + 100, 8))
    # It may be learned again.
    assert caller.observe(name, counted(first + 100), names=["b"]).texts == 1
    eventually(lambda: drafts_of(caller, name, first + 100) == [[first + 108]])


def test_only_old_text_is_forgotten(caller, name):
    caller.observe(name, counted(100))
    caller.call("Forget", namespace=name, older_than_s=3600.0)
    eventually(lambda: drafts_of(caller, name, 100) == [[108]])


@run
async def test_an_age_beyond_1970_is_published_as_1970():
    namespaces, published = Namespaces(ServiceConfig(drafting=DRAFTING)), []
    async with namespaces.use("a", ModelIdentity()) as namespace:
        namespace.publish = published.append
        await Admin(namespaces, lambda *_: None).forget(pb.ForgetRequest(namespace="a", older_than_s=1e306), EVERYBODY)
    assert [event.time for event in published] == [0.0]
    await namespaces.close()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({}, "nothing to forget is given: use request_id, older_than_s or everything"),
        ({"older_than_s": -1.0}, "older_than_s is -1.0; it is an age in seconds"),
        ({"older_than_s": float("nan")}, "older_than_s is nan"),
        ({"older_than_s": float("inf")}, "older_than_s is inf"),
    ],
)
def test_an_invalid_request_to_forget_is_refused(caller, name, what, message):
    caller.observe(name, counted(100))
    code, details = caller.refusal("Forget", namespace=name, **what)
    assert code is INVALID_ARGUMENT
    assert message in details


def refused_calls(caller):
    return json.loads(caller.call("Report").json)["service"]["refused"]


@pytest.mark.parametrize("method", ["Forget", "Report", "Snapshot", "DropNamespace"])
@pytest.mark.parametrize("asked", ["unknown", "../unknown", "n" * 500])
def test_an_unknown_namespace_is_refused_and_not_made(caller, method, asked):
    what = {"everything": True} if method == "Forget" else {}
    before = refused_calls(caller)
    code, details = caller.refusal(method, namespace=asked, **what)
    assert code is INVALID_ARGUMENT
    assert refused_calls(caller) == before + 1
    assert details == f"there is no namespace {asked[:200]!r}"
    assert asked not in [row.name for row in caller.call("ListNamespaces").namespaces]


def test_reports_and_snapshots_are_of_all_namespaces_or_one(service, caller, name):
    other = f"{name}-other"
    for each in (name, other):
        caller.observe(each, counted(100))
    report = json.loads(caller.call("Report", namespace=name).json)
    assert [namespace["name"] for namespace in report["namespaces"]] == [name]
    assert {name, other} <= {each["name"] for each in json.loads(caller.call("Report").json)["namespaces"]}
    [saved] = caller.call("Snapshot", namespace=name).saved
    assert (saved.namespace, saved.bytes) == (name, (service.snapshots / name / "corpus.ssd").stat().st_size)
    assert saved.seconds > 0
    assert not (service.snapshots / other).exists()
    assert {name, other} <= {saved.namespace for saved in caller.call("Snapshot").saved}
    assert (service.snapshots / other / "corpus.ssd").exists()


def test_namespaces_are_listed(caller, name):
    caller.observe(name, counted(100), model=pb.Model(name="llama", vocab_size=500))
    stream = caller.stream(name)

    def row():
        return next(row for row in caller.call("ListNamespaces").namespaces if row.name == name)

    found = eventually(lambda: row() if row().tokens else None)
    assert (found.model.name, found.model.vocab_size) == ("llama", 500)
    assert (found.is_loaded, found.tokens, found.capacity, found.streams, found.idle_s) == (True, 41, 300_000, 1, 0.0)
    assert found.memory_bytes > 1000
    stream.end()
    assert eventually(lambda: row().streams == 0)


def test_dropping_a_namespace_deletes_it_and_ends_its_streams(service, caller, name):
    caller.observe(name, counted(100))
    eventually(lambda: drafts_of(caller, name, 100) == [[108]])
    caller.call("Snapshot", namespace=name)
    stream = caller.stream(name)
    stream.exchange(starts=[start(1, counted(100)[:8])])
    caller.call("DropNamespace", namespace=name)
    assert stream.refusal() == (grpc.StatusCode.ABORTED, f"namespace {name!r} was dropped")
    assert not (service.snapshots / name).exists()
    assert name not in [row.name for row in caller.call("ListNamespaces").namespaces]
    assert lost(caller.stream(name).exchange(batch=batch({1: ()}))) == [1]
    assert drafts_of(caller, name, 100) == [[]]
    assert caller.observe(name, counted(100)).texts == 1


# Namespaces in this process, whose corpora only the test refreshes.

DRAFTING = DrafterConfig(capacity=100_000, refresh_interval_s=3600)


async def waits(task):
    """Return whether a task still waits after many iterations of the event loop."""
    for _ in range(20):
        await asyncio.sleep(0.001)
    return not task.done()


@run
async def test_a_caller_with_much_text_waits_for_the_index():
    with still_namespace(DRAFTING, max_waiting=99) as namespace:
        many = texts(*[[1]] * 300)
        total = pb.ObserveResponse()
        task = asyncio.create_task(learn(namespace, many, total))
        for turn in range(1, 4):
            assert await waits(task) == (turn < 3)
            assert namespace.corpus.waiting == 100
            await asyncio.to_thread(namespace.corpus.refresh)
        await task
        assert total == pb.ObserveResponse(tokens=300, texts=300)


@run
async def test_a_waiting_caller_fails_when_the_namespace_is_dropped():
    with still_namespace(DRAFTING, max_waiting=100) as namespace:
        task = asyncio.create_task(learn(namespace, texts(*[[1]] * (2 * TEXTS_PER_TURN)), pb.ObserveResponse()))
        assert await waits(task)
        namespace.close()
        with pytest.raises(ClosedError, match="namespace 'some' was dropped"):
            await task


@run
async def test_other_tasks_run_while_many_texts_are_learned():
    with still_namespace(DRAFTING, max_waiting=1 << 30) as namespace:
        many, turns = texts(*[[]] * (20 * TEXTS_PER_TURN)), 0
        learning = asyncio.create_task(learn(namespace, many, pb.ObserveResponse()))
        while not learning.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 20


@run
async def test_the_right_to_learn_is_checked_while_texts_are_learned():
    class Revoked(AuthorizedCall):
        """A caller whose right is taken after it was checked twice."""

        def require(self, right, namespace):
            checked.append((right, namespace))
            if len(checked) > 2:
                raise PermissionDeniedError("no")

    checked, namespaces = [], Namespaces(ServiceConfig(drafting=DRAFTING))
    request = pb.ObserveRequest(namespace="a", texts=texts(*[[1]] * (2 * TEXTS_PER_TURN)))
    with pytest.raises(PermissionDeniedError):
        await Admin(namespaces, lambda *_: None).observe(request, Revoked(CONTEXT, None))
    assert checked == [(Right.LEARN, "a")] * 3
    assert namespaces.loaded["a"].corpus.appended == TEXTS_PER_TURN
    await namespaces.close()


CONTEXT = SimpleNamespace(invocation_metadata=list, auth_context=dict)
EVERYBODY = AuthorizedCall(CONTEXT, None)


@run
async def test_without_a_folder_nothing_is_saved():
    namespaces = Namespaces(ServiceConfig(drafting=DRAFTING))
    admin = Admin(namespaces, lambda *_: None)
    async with namespaces.use("a", ModelIdentity()):
        with pytest.raises(SnapshotError, match="there is no snapshot folder; start the service with"):
            await admin.snapshot(pb.SnapshotRequest(), EVERYBODY)
    assert not (await admin.forget(pb.ForgetRequest(namespace="a", everything=True), EVERYBODY)).snapshot_saved
    await namespaces.close()


@run
async def test_a_namespace_that_cannot_be_saved_does_not_keep_others_from_being_saved(tmp_path, monkeypatch):
    async with opened(tmp_path) as namespaces:
        admin, own = Admin(namespaces, lambda *_: None), namespaces.save
        for name in "abcd":
            await learned(namespaces, name, [1, 2])

        async def save_after_a_drop(namespace):
            if namespace.name == "b":
                await namespaces.drop("c")
            return await own(namespace)

        monkeypatch.setattr(namespaces, "save", save_after_a_drop)
        (tmp_path / "a").write_text("a file in place of its folder")
        with pytest.raises(SnapshotError, match=r"^namespace 'a' is not saved: \[Errno 17\] File exists[^;]*$"):
            await admin.snapshot(pb.SnapshotRequest(), EVERYBODY)
        assert sorted(path.parent.name for path in tmp_path.glob("*/corpus.ssd")) == ["b", "d"]


@run
async def test_everything_is_forgotten_if_the_clock_was_ahead():
    namespaces = Namespaces(ServiceConfig(drafting=DRAFTING))
    admin = Admin(namespaces, lambda *_: None)
    async with namespaces.use("a", ModelIdentity()) as namespace:
        namespace.corpus.clock = lambda: 4e9
        namespace.learn(array(counted(100)), "r")
        await admin.forget(pb.ForgetRequest(namespace="a", older_than_s=0.0), EVERYBODY)
        assert namespace.corpus.requests == 1
        await admin.forget(pb.ForgetRequest(namespace="a", everything=True), EVERYBODY)
        assert namespace.corpus.requests == 0
    await namespaces.close()
