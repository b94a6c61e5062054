"""Faults of production: full disks, clocks that jump, garbage, clients that misbehave, and all of it at random."""

import asyncio
import itertools
import os
import random
import resource
import tempfile
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from hypothesis import settings

from drafter_service.client import DrafterClient
from drafter_service.server import server
from drafter_service.server.server import Housekeeping
from drafter_service.settings.tree import ServiceConfig, SnapshotsConfig
from drafter_service.stubs import drafter_pb2 as pb
from ssd.config import DrafterConfig
from ssd.corpus import snapshot
from ssd.corpus.snapshot import load
from tests.drafter_service import random_faults
from tests.drafter_service.fake_server import draft_of
from tests.drafter_service.guarded import run
from tests.drafter_service.raw import (
    TIMEOUT_S,
    batch,
    connected,
    counted,
    drafted,
    eventually,
    finish,
    hello,
    lost,
    start,
    texts,
)
from tests.drafter_service.server.opened_namespaces import raising
from tests.servers import served, serving
from tests.strategies import array

IS_SOAK = settings().max_examples > settings.get_profile("project").max_examples
STREAMS = 50
MB = 1_000_000


def resident_bytes(process):
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * resource.getpagesize()


# Killed.


def during_a_merge(caller, _folder):
    """Begin a merge of much text into the base tier."""
    for part in np.random.default_rng(0).integers(0, 50_000, (10, 20_000)):
        assert caller.observe("kept", part).tokens


def during_a_snapshot(caller, folder):
    """Begin to write a snapshot."""
    caller.observe("kept", np.random.default_rng(1).integers(0, 50_000, 300_000))
    saving = caller.begin("Snapshot", namespace="kept")

    def is_being_written():
        nonlocal saving
        if saving.done():
            saving = caller.begin("Snapshot", namespace="kept")
        return [*(folder / "kept").glob(".*.part")]

    eventually(is_being_written)


def test_a_server_that_is_killed_restores_what_was_saved_and_one_that_is_terminated_saves(tmp_path, socket_address):
    arguments, learned = ["--listen", socket_address, "--capacity", "1M", "--snapshot-folder", str(tmp_path)], []
    for moment in (during_a_merge, during_a_snapshot, None):
        with served(*arguments) as process, connected(socket_address) as caller:
            for first in learned:
                assert caller.probe("kept", counted(first)[:8], limit=1) == [first + 8]
            # The sequences are lost, and have drafts once they are registered again.
            stream = caller.stream("kept")
            assert lost(stream.exchange(batch=batch({1: [3]}))) == [1]
            again = start(1, [1, 2, 3, 1, 2], committed=np.array([3], np.uint32).tobytes())
            assert stream.draft(1, starts=[again], limit=2) == [1, 2]
            if moment is not None:
                learned.append(100_000 + 100 * len(learned))
                caller.observe("kept", counted(learned[-1]))
                caller.call("Snapshot", namespace="kept")
                moment(caller, tmp_path)
                process.kill()
            else:
                caller.observe("kept", counted(50), names=["late"])
                process.terminate()
                process.wait(TIMEOUT_S)
    assert load(tmp_path / "kept" / "corpus.ssd").corpus.text_of("late").tolist() == counted(50)


# The clock jumps.


@run
async def test_housekeeping_survives_jumps_of_the_clock_and_exceptions_and_finishes_work_in_progress(monkeypatch):
    clock, seen, saves = itertools.cycle([1e9, 2e9, 5.0, 1.5e9]), set(), []
    began, may_end = asyncio.Event(), asyncio.Event()
    monkeypatch.setattr("drafter_service.server.server.time.time", lambda: next(clock))
    monkeypatch.setattr("drafter_service.server.server.SAMPLE_S", 0.001)

    async def save_changed():
        saves.append("began")
        if len(saves) < 5:
            raise RuntimeError("can't start new thread")
        began.set()
        await may_end.wait()

    async def unload_idle(_idle_s):
        saves.append("unloaded")

    namespaces = SimpleNamespace(
        loaded={"a": SimpleNamespace(record_sample=seen.add)}, save_changed=save_changed, unload_idle=unload_idle
    )
    housekeeping = Housekeeping(namespaces, ServiceConfig(snapshots=SnapshotsConfig(interval_s=0.001)))
    housekeeping.start()
    async with asyncio.timeout(TIMEOUT_S):
        await began.wait()
        while len(seen) < 4:
            await asyncio.sleep(0.001)
        stopping = asyncio.create_task(housekeeping.stop())
        await asyncio.sleep(0)
        assert not stopping.done()
        may_end.set()
        await stopping
    assert saves == [*["began"] * 5, "unloaded"]


@run
async def test_callers_are_checked_in_a_thread_that_may_hang(monkeypatch):
    monkeypatch.setattr(server, "CHECK_INTERVAL_S", 0.001)
    checks, checked, never = [], asyncio.Event(), threading.Event()
    loop, problems = asyncio.get_running_loop(), [RuntimeError("nested too deeply")]

    def check():
        checks.append(threading.current_thread())
        if problems:
            raise problems.pop()
        loop.call_soon_threadsafe(checked.set)
        never.wait()

    idle = SimpleNamespace(loaded={})
    housekeeping = Housekeeping(idle, ServiceConfig(), SimpleNamespace(check=check))
    housekeeping.start()
    async with asyncio.timeout(TIMEOUT_S):
        await checked.wait()
        await housekeeping.stop()
    assert len(checks) == 2
    assert threading.current_thread() not in checks
    never.set()


# Garbage, floods and silence.


@pytest.fixture(scope="module")
def service():
    """Yield a server with low limits, for invalid input."""
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        address = f"unix:{folder}/drafter.sock"
        arguments = ["--listen", address, "--capacity", "50k", "--memory-limit", "200M"]
        arguments += ["--snapshot-folder", f"{folder}/snapshots"]
        limits = {"streams": STREAMS, "sequences": 200, "stream_tokens": "1M"}
        arguments += [part for name, limit in limits.items() for part in ("--set", f"limits.{name}={limit}")]
        with served(*arguments) as process:
            yield SimpleNamespace(address=address, process=process, snapshots=Path(folder) / "snapshots")


@pytest.fixture(params=[False, True], ids=["grpc", "steps"])
def caller(service, request):
    """Yield a caller whose streams use gRPC or the step socket."""
    with connected(service.address, over_steps=request.param) as caller:
        yield caller


def damaged(data, rng):
    """Return a message with some bytes changed, removed or repeated."""
    data = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at, size = rng.randrange(len(data) + 1), rng.randrange(1, 9)
        change = rng.randrange(4)
        if change == 0:
            data[at : at + 1] = rng.randbytes(1)
        elif change == 1:
            del data[at : at + size]
        elif change == 2:
            data[at:at] = data[at : at + size]
        else:
            data[at : at + size] = rng.randbytes(size)
    return bytes(data)


def valid_requests(rng):
    """Return the requests of a stream, in order."""
    for number in itertools.count(1):
        tokens = [rng.randrange(30) for _ in range(rng.randrange(20))]
        yield pb.DraftRequest(
            step=number,
            starts=[start(number, tokens, session_id=f"s{number % 5}", request_id=f"r{number}", learn=number % 3 > 0)],
        )
        yield pb.DraftRequest(
            step=number,
            batch=batch({number: tokens[:3], max(1, number - 1): [1]}, limit=rng.randrange(20)),
            counters=pb.ClientCounters(timeouts=number, reconnects=number % 2),
        )
        yield pb.DraftRequest(step=number, finishes=[finish(max(1, number - 2), tokens, steps=rng.randrange(3))])


def test_thousands_of_damaged_messages_are_answered(service, caller):
    rng = random.Random(11)
    stream = eventually(lambda: caller.opened("fuzzed"))
    valid = valid_requests(rng)
    codes = Counter()
    before = resident_bytes(service.process)
    for _ in range(100 if IS_SOAK else 5):
        for _ in range(1000):
            data = next(valid).SerializeToString()
            stream.send(rng.randbytes(rng.randrange(60)) if rng.random() < 0.2 else damaged(data, rng))
        for _ in range(1000):
            response = stream.read()
            codes[response.error.code if response.HasField("error") else response.WhichOneof("result")] += 1
    assert codes.keys() == {"drafts", grpc.StatusCode.INVALID_ARGUMENT.value[0]}
    assert min(codes.values()) > 500
    assert resident_bytes(service.process) - before < 60 * MB
    # The learned probabilities can have any values now, so the cost is minimal.
    new = 1 << 60
    response = stream.exchange(starts=[start(new, [1005, 1006, 1005])], batch=batch({new: ()}, limit=1, cost=1e-9))
    assert drafted(response) == [1006]


EXPECTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
MODEL = pb.Model(name="m", tokenizer="t", vocab_size=100)
CALLS = {
    "Observe": pb.ObserveRequest(namespace="fuzz", model=MODEL, texts=texts([1, 2], [3], names=["a", "b"])),
    "Forget": pb.ForgetRequest(namespace="fuzz", request_id="a"),
    "Report": pb.ReportRequest(namespace="fuzz"),
    "Snapshot": pb.SnapshotRequest(namespace="fuzz"),
    "ListNamespaces": pb.ListNamespacesRequest(),
    "DropNamespace": pb.DropNamespaceRequest(namespace="fuzz"),
    "Draft": pb.DraftRequest(hello=hello("fuzz", name="m"), starts=[start(1, [1, 2])]),
}


def status_of(channel, method, data):
    """Return the status with which a call with one message ends."""
    is_stream = method == "Draft"
    path = f"/ssd.drafter.v1.DrafterService/{method}"
    call = (channel.stream_stream if is_stream else channel.unary_unary)(path)
    try:
        answer = call(iter([data]) if is_stream else data, timeout=TIMEOUT_S, wait_for_ready=True)
        list(answer)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", CALLS)
def test_damaged_calls_are_answered_with_a_status(service, method):
    rng = random.Random(method)
    data = CALLS[method].SerializeToString()
    codes = Counter()
    with connected(service.address) as caller:
        assert status_of(caller.channel, method, b"\xff\xff") is grpc.StatusCode.INVALID_ARGUMENT
        for _ in range(2000 if IS_SOAK else 60):
            message = rng.randbytes(rng.randrange(40)) if rng.random() < 0.2 else damaged(data, rng)
            codes[status_of(caller.channel, method, message)] += 1
        # A stream answers damaged requests, and continues.
        assert codes[grpc.StatusCode.INVALID_ARGUMENT] > 5 or method == "Draft"
        assert caller.probe("default", [5, 6, 5], limit=2) == [6, 5]
    assert codes.keys() <= EXPECTED


def test_many_empty_sequences_take_no_memory(service, caller):
    stream = eventually(lambda: caller.opened("flooded"))
    before = resident_bytes(service.process)
    for field in (b"\x1a\x00", b"\x22\x00"):
        assert "at most 65536 sequences" in stream.exchange(field * (8 << 20)).error.message
    # Parsed, each of these messages would take half a gigabyte.
    assert resident_bytes(service.process) - before < 150 * MB


def test_a_client_that_reads_no_responses_is_not_read_from(service, caller):
    stream = eventually(lambda: caller.opened("unread"))
    stream.exchange(starts=[start(number, counted(100 * number, 50) * 3) for number in range(64)])
    request = pb.DraftRequest(batch=batch(dict.fromkeys(range(64), ()), limit=32, cost=1e-30)).SerializeToString()
    size = len(stream.exchange(request).SerializeToString())
    before = resident_bytes(service.process)
    for _ in range(100 * MB // size):
        stream.send(request)
    # Other clients are served in the meantime, for longer than reading all requests would take.
    other = caller.stream("unread")
    for _ in range(1000):
        assert not other.exchange().HasField("error")
    assert resident_bytes(service.process) - before < 20 * MB
    assert len(drafted(stream.read(), 64)) == 32


# Random faults.


def test_nothing_that_was_saved_is_lost_to_random_faults():
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        random_faults.main(folder, 1000 if IS_SOAK else 14, 5)


# The disk is full, does not answer, or fails.


def test_a_full_disk_only_prevents_snapshots(service):
    process, path = service.process, service.snapshots / "full" / "corpus.ssd"
    with connected(service.address) as caller:
        caller.observe("full", counted(100))
        caller.call("Snapshot", namespace="full")
        old = path.read_bytes()
        # Files may not grow beyond half of what the snapshot needs.
        _, most = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (len(old) // 2, most))
        caller.observe("full", counted(200))
        code, message = caller.refusal("Snapshot", namespace="full")
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        reason = f"{path}: cannot be written: File too large; free space or save elsewhere"
        assert message == f"namespace 'full' is not saved: {reason}"
        # The text is forgotten, but the error reports that the disk still has it.
        assert caller.refusal("Forget", namespace="full", request_id="r")[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert path.read_bytes() == old
        assert sorted(each.name for each in path.parent.iterdir()) == ["corpus.ssd", "namespace.json"]
        eventually(lambda: caller.probe("full", counted(200)[:8], limit=1) == [208])
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))
        assert caller.call("Snapshot", namespace="full").saved[0].bytes >= len(old)
        assert load(path, 50_000, 32).corpus.requests == 2
        assert os.pread(process.log.fileno(), 1 << 16, 0).count(b"snapshot not saved") == 2


def test_a_disk_that_does_not_answer_only_prevents_snapshots():
    with tempfile.TemporaryDirectory(prefix="ssd-") as name, random_faults.Sidecar(Path(name)) as sidecar:
        caller, load_ = sidecar.caller, random_faults.Load(sidecar, random.Random(0))
        # A disk of a busy machine may be slower than the short limits of this sidecar.
        eventually(lambda: load_.call("Observe", namespace="a", texts=texts(counted(100), names=["mine"])))
        eventually(lambda: load_.call("Snapshot"))
        caller.observe("a", counted(200), names=["other"])
        sidecar.fail("STALL 1")
        code, message = caller.refusal("Snapshot", namespace="a")
        assert (code, "is still being written after" in message) == (grpc.StatusCode.FAILED_PRECONDITION, True)
        # Much more than the ring has slots is learned, and becomes draftable.
        for first in range(10_000, 250_000, 10_000):
            caller.observe("a", counted(first, 9_999), names=[str(first)])
            eventually(lambda first=first: caller.probe("a", counted(first)[:8], limit=1) == [first + 8])
        code, message = caller.refusal("Forget", namespace="a", request_id="240000")
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert message.startswith("the text is forgotten in memory, but")
        assert caller.probe("a", counted(240_000)[:8], limit=1) == []
        assert '"name":"a"' in caller.call("Report").json
        for method, what in (("ListNamespaces", {}), ("Observe", {"namespace": "b"})):
            code, message = caller.refusal(method, **what)
            assert code is grpc.StatusCode.UNAVAILABLE
            assert message.startswith("not ready: ")
        # It can even be stopped.
        sidecar.stop()


@pytest.mark.parametrize("has_socket", [False, True], ids=["grpc", "steps"])
def test_a_client_goes_on_without_drafts_while_its_namespace_cannot_be_loaded(
    tmp_path, socket_address, has_socket, monkeypatch
):
    settings = {"drafting": DrafterConfig(capacity=50_000), "snapshots": SnapshotsConfig(tmp_path)}
    monkeypatch.setattr("drafter_service.server.namespaces.RETRY_S", 0.1)
    with serving(listen=socket_address, **settings), connected(socket_address) as caller:
        caller.observe("a", counted(100))
    losses = []
    with serving(listen=socket_address, **settings), monkeypatch.context() as patch:
        patch.setattr(snapshot, "load", raising(OSError(5, "Input/output error")))
        if not has_socket:
            Path(socket_address.removeprefix("unix:") + ".steps").unlink()
        connecting = DrafterClient(
            socket_address, namespace="a", required=False, on_lost=losses.append, deadline_s=TIMEOUT_S
        )
        with closing(connecting) as client:
            client.start(1, array(counted(100)[:8]))
            eventually(lambda: losses)
            assert losses[0].startswith("not ready: namespace 'a' cannot be loaded now: [Errno 5] Input/output error")
            assert draft_of(client, []) == []
            patch.undo()
            eventually(lambda: draft_of(client, [])[:1] == [108])
            assert len(losses) == 1
