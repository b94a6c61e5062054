"""Draft streams of the real server: handshakes, drafts, and refusals with their status."""

import asyncio
import itertools
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from drafter_service.auth.callers import access_control
from drafter_service.server.calls import Refusals
from drafter_service.server.namespaces import Namespaces
from drafter_service.server.stream import DraftStreams, draft_method
from drafter_service.settings.tree import AccessConfig, Limits, ServiceConfig
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import SHAPE_CODES
from ssd.config import DrafterConfig
from ssd.types import ROOT
from tests.certificates import replace_file
from tests.drafter_service.guarded import caller_entry, run
from tests.drafter_service.raw import (
    TIMEOUT_S,
    batch,
    connected,
    counted,
    drafted,
    drafts_in,
    eventually,
    finish,
    hello,
    lost,
    start,
)
from tests.servers import serving

INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT
RIGHTS = {
    "everything": ("*", "read", "learn", "admin"),
    "second": ("*", "read", "learn"),
    "reader": ("*", "read"),
    "learner": ("*", "learn"),
    "alice": ("alice-*", "read", "learn", "admin"),
}
STREAMS = 40


@pytest.fixture(scope="module")
def checked_always():
    """Let the callers file be checked at each use."""
    with pytest.MonkeyPatch.context() as patch:
        checked = lambda config, **_: access_control(config, check_interval_s=0.0)  # noqa: E731
        patch.setattr("drafter_service.server.listener.access_control", checked)
        yield


@pytest.fixture(scope="module")
def service(checked_always):
    """Yield callers of one server, by name; `service.file` is the callers file."""
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        address, file = f"unix:{folder}/drafter.sock", Path(folder) / "callers.toml"
        entries = {name: caller_entry(name, *rights) for name, rights in RIGHTS.items()}
        file.write_text("".join(entries.values()))
        limits = Limits(streams=STREAMS, sequences=500, stream_tokens=1_000_000)
        drafting, access = DrafterConfig(capacity=100_000), AccessConfig(callers=file)
        with serving(listen=address, drafting=drafting, access=access, limits=limits):
            yield SimpleNamespace(address=address, file=file, entries=entries)


@pytest.fixture(params=[False, True], ids=["grpc", "steps"])
def over_steps(request):
    """Return whether streams use the step socket."""
    return request.param


@pytest.fixture
def calling(service, over_steps):
    """Return a function that makes callers of the service, by name."""

    def called(name="everything"):
        return connected(service.address, [("authorization", f"Bearer {name}")], over_steps=over_steps)

    return called


@pytest.fixture
def caller(calling):
    with calling() as caller:
        yield caller


@pytest.mark.parametrize("engine", ["node-1:1", ""])
def test_a_handshake_is_answered(caller, name, engine):
    stream = caller.stream()
    engine = {"client": "vllm/0.32.0 ssd-drafter/0.1.0", "engine": engine}
    greeting = pb.Hello(protocol=3, namespace=name, **engine)
    response = stream.exchange(step=3, hello=greeting, starts=[start(1, [5, 6, 5])], batch=batch({1: ()}, 2))
    assert (response.step, response.welcome.protocol, response.welcome.namespace) == (3, 3, name)
    assert response.welcome.may_learn
    assert response.welcome.max_draft == 32
    assert (response.welcome.max_sequences, response.welcome.max_tokens) == (500, 1_000_000)
    assert drafted(response) == [6, 5]
    assert not stream.exchange(step=4).HasField("welcome")
    [namespace] = json.loads(caller.call("Report", namespace=name).json)["namespaces"]
    [row] = namespace["by_client"]
    assert {**row, **engine, "streams": 1, "engine_steps": 1, "offered": 2, "late_steps": 0} == row


@pytest.mark.parametrize("shape", [None, "path", "tree"])
def test_drafts_have_the_shape_that_the_engine_verifies(caller, name, shape):
    """The service is configured for paths."""
    handshake = hello(name)
    handshake.draft_shape = SHAPE_CODES[shape]
    wanted = batch({1: ()}, 8, cost=0.0001)
    response = caller.stream().exchange(hello=handshake, starts=[start(1, [5, 6, 7, 5, 6, 8, 5, 6])], batch=wanted)
    parents = drafts_in(response.drafts, 1).parents_of(0).tolist()
    assert parents.count(ROOT) == (2 if shape == "tree" else 1)


def test_an_old_namespace_serves_clients_that_send_the_configuration(caller):
    """Also copies of its folder, once a client of its own folder was there."""
    old = {"name": "Old-1B", "tokenizer": "old", "vocab_size": 500}
    new = {**old, "vocabulary": "v", "configuration": "llama:c"}
    copied = {**new, "name": "copied", "tokenizer": "saved again"}
    names = [caller.stream("", **model).welcome.namespace for model in (old, new, copied, old)]
    assert names[0].startswith("Old-1B-")
    assert {*names} == {names[0]}
    assert caller.observe("", model=pb.Model(**copied)).namespace == names[0]
    (row,) = [row for row in caller.call("ListNamespaces").namespaces if row.name == names[0]]
    assert row.is_default


def test_an_empty_namespace_names_another_one_with_text_of_the_same_tokenizer(caller, name):
    identity = {"tokenizer": name, "vocab_size": 500}
    assert caller.observe(name, counted(100), model=pb.Model(**identity)).held == pb.Held()
    eventually(lambda: caller.stream(name).welcome.held == pb.Held(tokens=41))
    assert caller.stream("", **identity).welcome.held == pb.Held(other=name, other_tokens=41)
    assert caller.stream("", tokenizer=f"not {name}").welcome.held == pb.Held()


def test_a_client_without_a_model_learns_the_size_of_the_vocabulary(caller, name):
    assert [caller.stream(name, vocab_size=size).welcome.vocab_size for size in (0, 500, 0)] == [0, 500, 500]


@pytest.mark.parametrize(
    ("handshake", "code", "message"),
    [
        (pb.Hello(protocol=2), "FAILED_PRECONDITION", "the client uses protocol 2, this service 3; install the same"),
        (pb.Hello(), "FAILED_PRECONDITION", "the client uses protocol 0, this service 3"),
        (hello("../etc"), "INVALID_ARGUMENT", "a namespace cannot be called '../etc'"),
        (hello("x" * 1_000_000), "INVALID_ARGUMENT", "a namespace cannot be called"),
        (hello("n", name="m" * 600), "INVALID_ARGUMENT", "model.name has 600 characters"),
        *(
            (pb.Hello(protocol=3, engine=engine), "INVALID_ARGUMENT", "is not a name of an engine")
            for engine in ("a b", 'a"b', "a\n", "é", "x" * 129)
        ),
    ],
)
def test_an_invalid_handshake_is_refused_with_a_reason(caller, handshake, code, message):
    status, details = caller.stream().refusal(hello=handshake)
    assert status.name == code
    assert message in details
    assert len(details) < 400


def test_a_malformed_request_is_answered_and_the_stream_continues(caller, name):
    stream = caller.stream(name)
    assert "not a DraftRequest" in stream.exchange(b"\xff\xff\xff").error.message
    assert "at most 65536 sequences" in stream.exchange(b"\x1a\x00" * 70_000).error.message
    wrong = stream.exchange(step=2, batch=pb.Batch(sequence_ids=b"123"))
    assert (wrong.step, wrong.error.code) == (2, INVALID_ARGUMENT.value[0])
    assert "batch.sequence_ids has 3 bytes" in wrong.error.message
    again = stream.exchange(step=3, hello=hello("another"), starts=[start(1, [1])])
    assert (again.step, again.error.code) == (3, INVALID_ARGUMENT.value[0])
    assert "hello is only valid in the first request of a stream" in again.error.message
    assert stream.draft(1, starts=[start(1, [5, 6, 5])], limit=2) == [6, 5]


@pytest.mark.parametrize("first", [b"\xff", b"", pb.DraftRequest(starts=[start(1, [1])]).SerializeToString()])
def test_a_stream_without_a_handshake_is_refused(caller, first):
    stream = caller.stream()
    stream.send(first)
    assert stream.refusal() == (INVALID_ARGUMENT, "the first request of a stream has no hello")


def test_streams_learn_from_each_other_and_have_separate_sequences(caller, name):
    first, second = caller.stream(name), caller.stream(name)
    first.exchange(starts=[start(1, [1, 2, 3])])
    assert lost(second.exchange(finishes=[finish(1)])) == [1]
    first.exchange(finishes=[finish(1, [4, 5, 6])])
    sequence_ids = itertools.count(2)
    assert eventually(lambda: second.draft(i := next(sequence_ids), starts=[start(i, [1, 2, 3])], limit=3)) == [4, 5, 6]


def test_the_sequences_of_a_stream_end_with_it(caller, name):
    for end in ("cut", "end"):
        stream = caller.stream(name)
        stream.exchange(starts=[start(1, [1, 2, 3, 1])])
        getattr(stream, end)()
        assert lost(caller.stream(name).exchange(batch=batch({1: ()}))) == [1]


def test_nothing_is_learned_from_a_caller_without_the_right(calling, caller, name):
    prompt, output = counted(100, 20), counted(200, 20)
    with calling("reader") as reader:
        stream = reader.stream(name)
        assert not stream.welcome.may_learn
        stream.exchange(starts=[start(1, prompt)])
        stream.exchange(batch=batch({1: output}))
        other = caller.stream(name)
        other.exchange(starts=[start(1, counted(300, 20))])
        assert drafted(other.exchange(starts=[start(2, output[:5])], batch=batch({2: ()}))) == []
        stream.exchange(finishes=[finish(1)])
        other.exchange(finishes=[finish(1, counted(400, 20))])
        assert eventually(lambda: caller.probe(name, counted(400, 5), limit=1)) == [405]
        assert caller.probe(name, output[:5]) == []


def test_a_refusal_does_not_reveal_whether_a_namespace_exists(calling, caller, name):
    caller.observe(f"{name}-known", [1, 2, 3])
    with calling("alice") as alice:
        assert alice.stream(f"alice-{name}").welcome.may_learn
        refusals = []
        for asked in (f"{name}-known", f"{name}-empty"):
            status, details = alice.stream().refusal(hello=hello(asked))
            assert status is grpc.StatusCode.PERMISSION_DENIED
            refusals.append(details.replace(asked, "..."))
        assert refusals[0] == refusals[1] == "caller 'alice' has no read right to namespace '...'"
    with calling("learner") as learner:
        assert learner.stream().refusal(hello=hello(name))[0] is grpc.StatusCode.PERMISSION_DENIED
    with calling("stranger") as stranger:
        assert stranger.stream().refusal() == (grpc.StatusCode.UNAUTHENTICATED, "the bearer token is not known")


@pytest.mark.parametrize(("left", "code"), [(None, "UNAUTHENTICATED"), ("learn", "PERMISSION_DENIED")])
def test_revoked_rights_end_the_stream(service, calling, caller, name, left, code):
    kept = caller_entry("second", "*", left) if left else ""
    try:
        with calling("second") as second:
            stream = eventually(lambda: second.opened(name))
            replace_file(service.file, "".join((service.entries | {"second": kept}).values()))

            def refused():
                try:
                    stream.exchange()
                except grpc.RpcError as error:
                    return error.code().name
                return None

            assert eventually(refused) == code
    finally:
        replace_file(service.file, "".join(service.entries.values()))


def test_streams_beyond_the_limit_are_refused_until_others_end(service, calling):
    with calling() as caller:
        streams = [caller.stream() for _ in range(STREAMS + 20)]
        eventually(lambda: sum(stream.has_ended() for stream in streams) >= 20)
        idle = [stream for stream in streams if not stream.has_ended()]
        assert {stream.refusal() for stream in streams if stream.has_ended()} == {
            (grpc.StatusCode.RESOURCE_EXHAUSTED, f"the service has its {STREAMS} streams already")
        }
        # The others are served once they send a request.
        assert idle[0].exchange(hello=hello("default")).welcome.namespace == "default"
        idle[1].end()
        assert eventually(lambda: caller.opened("default"))


@pytest.mark.parametrize("is_dropped", [True, False])
@pytest.mark.parametrize("is_answering", [True, False])
@run
async def test_a_stream_that_the_service_ends_always_has_a_status(is_dropped, is_answering):
    """If a stream were cancelled while gRPC sends a response, its client would wait forever."""
    config, ends = ServiceConfig(drafting=DrafterConfig(capacity=5000)), []

    async def abort(*status):
        ends.append(status)
        raise grpc.aio.AbortError

    context = SimpleNamespace(invocation_metadata=list, auth_context=dict, abort=abort)
    namespaces = Namespaces(config)
    refusals = Refusals()
    streams = DraftStreams(namespaces, access_control(config.access), config.limits, refusals)
    is_sending, is_sent, no_more = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def requests():
        yield pb.DraftRequest(hello=hello("a")).SerializeToString()
        await no_more.wait()

    async def served():
        async for _ in draft_method(streams).stream_stream(requests(), context):
            is_sending.set()
            await is_sent.wait()

    serving = asyncio.create_task(served())
    async with asyncio.timeout(TIMEOUT_S):
        await is_sending.wait()
        if not is_answering:
            is_sent.set()
            await asyncio.sleep(0)
        if is_dropped:
            await namespaces.drop("a")
        else:
            streams.all.stop()
        is_sent.set()
        [ended], _ = await asyncio.wait([serving])
        await namespaces.close()
    if is_dropped:
        assert isinstance(ended.exception(), grpc.aio.AbortError)
        assert ends == [(grpc.StatusCode.ABORTED, "namespace 'a' was dropped")]
    else:
        assert ended.exception() is None
    assert not streams.all._streams
    assert refusals.total == 0
