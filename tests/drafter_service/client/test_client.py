"""The client over real sockets, against a service whose failures tests control."""

import errno
import socket
import struct
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from random import Random

import grpc
import pytest
from structlog.testing import capture_logs

from drafter_service.client import DrafterClient
from drafter_service.client.connection import (
    FIRST_BACKOFF_S,
    GOOD_RESPONSES,
    LONGEST_BACKOFF_S,
    ConnectionState,
    StreamEnd,
)
from drafter_service.client.messages import Welcome
from drafter_service.observability.facts import ModelIdentity
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.frames import MAGIC, Frames, framed
from ssd.errors import UserError
from tests.drafter_service.client_wire import counting
from tests.drafter_service.fake_server import TIMEOUT_S, FakeService, fake_server_thread, unpacked
from tests.drafter_service.raw import eventually
from tests.replay import progress_of
from tests.strategies import array


@pytest.fixture(params=[False, True], ids=["grpc", "steps"])
def fake(socket_address, request):
    """Yield a fake service, over gRPC or over the step socket."""
    with fake_server_thread(socket_address, FakeService(counting), has_steps=request.param) as server:
        yield server


@pytest.fixture
def connect(socket_address):
    """Return a function that connects clients, with long deadlines for busy machines; all are closed at the end."""
    clients = []

    def connected(**options):
        clients.append(DrafterClient(socket_address, **{"deadline_s": TIMEOUT_S, **options}))
        return clients[-1]

    yield connected
    for client in clients:
        client.close()


def draft_of(client, committed, limit=1, **outcome):
    return client.draft(progress_of({1: committed}, limit, **outcome)).tokens.tolist()


def test_a_stream_begins_with_the_handshake(fake, connect):
    model = ModelIdentity("org/model", "abc", "lora", 1000)
    connect(model=model, namespace="team-a", host="vllm/0.32.0")
    [request] = fake.service.requests
    hello = request.hello
    assert (hello.protocol, hello.namespace) == (3, "team-a")
    assert (hello.model.name, hello.model.tokenizer) == ("org/model", "abc")
    assert (hello.model.adapter, hello.model.vocab_size) == ("lora", 1000)
    assert hello.client.startswith("vllm/0.32.0 ssd-drafter/")


def test_the_service_says_what_it_allows(fake, connect):
    fake.service.max_draft, fake.service.may_learn = 16, False
    assert connect(namespace="team-a").welcome == Welcome("team-a", False, 16, 0, 0)


def test_the_number_of_steps_is_sent(fake, connect):
    client = connect()
    client.start(1, array([5]))
    draft_of(client, [], limit=2)
    client.draft(replace(progress_of({1: [9, 9, 9]}, limit=2), steps=array([3])))
    assert unpacked(fake.service.requests[-1].batch.steps) == [3]
    client.finish(1, array([9, 9]), steps=2)
    client.close()
    assert [finish.steps for request in fake.service.requests for finish in request.finishes] == [2]


def test_hints_are_sent_apart_from_the_prompt(fake, connect):
    client = connect()
    client.start(1, array([5]), hints=array([7, 8]))
    draft_of(client, [])
    [start] = [start for request in fake.service.requests for start in request.starts]
    assert (unpacked(start.hints), unpacked(start.prompt)) == ([7, 8], [5])


def test_forgetting_needs_the_service(fake, connect):
    client = connect()
    with pytest.raises(UserError, match="'name' is not forgotten by the drafter at"):
        client.forget("name")  # The fake service has no such call.


def test_an_interrupt_ends_the_wait_for_drafts(fake, connect, monkeypatch):
    client = connect()
    client.start(1, array([5]))

    def interrupt(stream, timeout_s):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(client._stream), "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            draft_of(client, [])
    client.start(2, array([6]))
    client.finish(1, array([6]))


def test_the_arguments_of_start_and_finish_are_sent(fake, connect):
    client = connect()
    client.start(1, array([5]), session_id="chat", request_id="req-1", learn=False)
    client.start(2, array([6]))
    client.draft(progress_of({1: [], 2: []}, limit=1))
    first, second = (request.starts[0] for request in fake.service.requests[1:3])
    assert (first.session_id, first.request_id, first.learn) == ("chat", "req-1", False)
    assert (second.session_id, second.learn) == ("", True)
    client.finish(1, array([7]))
    client.finish(2, array([8]), learn=True)
    client.close()
    assert list(fake.service.learned.values()) == [[6, 8]]


def test_after_a_lost_connection_only_drafts_are_missing(fake, connect):
    news = []
    client = connect(on_lost=news.append)
    client.start(1, array([5]))
    assert draft_of(client, []) == [6]
    fake.stop()
    eventually(lambda: client.lost is not None)
    began = time.monotonic()
    assert draft_of(client, [6]) == []
    client.start(2, array([50]))
    client.finish(2, array([51]))
    assert time.monotonic() - began < TIMEOUT_S / 2
    fake.start()
    eventually(lambda: client.lost is None)
    assert draft_of(client, [7]) == [8]
    eventually(lambda: [50, 51] in fake.service.learned.values())
    assert fake.service.texts() == [[5, 6, 7]]
    assert client.counters.reconnects == 1
    assert client.counters.timeouts == 0
    assert len(news) == 1
    for _ in range(GOOD_RESPONSES):
        assert draft_of(client, []) == [8]
    fake.stop()
    eventually(lambda: len(news) == 2)


def test_a_stream_that_breaks_during_a_step_ends_the_wait(fake, connect):
    client = connect()
    client.start(1, array([5]))
    assert draft_of(client, []) == [6]
    fake.pause()
    threading.Timer(0.05, fake.cut).start()
    began = time.monotonic()
    assert draft_of(client, [6]) == []
    assert time.monotonic() - began < TIMEOUT_S / 2
    fake.resume()
    eventually(lambda: client.lost is None and draft_of(client, []) == [7])
    assert fake.service.texts() == [[5, 6]]
    assert client.counters.resyncs == 1


def test_the_client_waits_once_for_a_late_service_and_sends_nothing_before_its_answer(fake, connect):
    client = connect(deadline_s=0.01)
    client._deadline_s = TIMEOUT_S
    client.start(1, array([5]))
    assert draft_of(client, []) == [6]
    before = len(fake.service.requests)
    fake.pause()
    client._deadline_s = 0.01
    began = time.monotonic()
    for token in range(6, 26):
        assert draft_of(client, [token]) == []
    client._deadline_s = TIMEOUT_S
    assert draft_of(client, [26]) == []
    assert time.monotonic() - began < TIMEOUT_S / 2
    assert client.counters.timeouts == 21
    fake.resume()
    eventually(lambda: client.counters.dropped == 1)
    assert draft_of(client, [27]) == [28]
    assert len(fake.service.requests) == before + 2
    assert unpacked(fake.service.requests[-1].batch.tokens) == list(range(7, 28))
    assert unpacked(fake.service.requests[-1].batch.steps) == [21]
    assert client.lost is None


def test_an_unanswered_stream_is_closed(fake, connect, monkeypatch):
    news = []
    monkeypatch.setattr("drafter_service.client.client.PATIENCE_S", 0.05)
    client = connect(deadline_s=0.01, on_lost=news.append)
    client.start(1, array([5]))
    fake.pause()
    eventually(lambda: draft_of(client, []) == [] and news)
    assert "has not answered for" in news[0]
    fake.resume()
    client._deadline_s = TIMEOUT_S
    monkeypatch.undo()
    eventually(lambda: client.lost is None and draft_of(client, []) == [6])


FINAL = [
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.INVALID_ARGUMENT,
]


@pytest.mark.parametrize("code", FINAL)
def test_a_refusal_is_final_and_reported_once(fake, connect, code, socket_address, monkeypatch):
    monkeypatch.setattr("drafter_service.client.client.CONNECT_TIMEOUT_S", TIMEOUT_S)
    fake.server.refusal = (code, "not you")
    began = time.monotonic()
    with pytest.raises(UserError, match=f"the drafter at {socket_address} does not serve this client: not you"):
        connect()
    assert time.monotonic() - began < TIMEOUT_S / 2
    news = []
    client = connect(required=False, on_lost=news.append)
    client._thread.join(TIMEOUT_S)
    assert not client._thread.is_alive()
    assert news == ["not you"]
    assert client.lost == "not you"
    client.start(1, array([5]))
    assert draft_of(client, []) == []


def test_a_refusal_after_a_lost_connection_is_final(fake, connect):
    news = []
    client = connect(on_lost=news.append)
    fake.server.refusal = (grpc.StatusCode.PERMISSION_DENIED, "no more")
    fake.cut()
    client._thread.join(TIMEOUT_S)
    assert not client._thread.is_alive()
    assert client.lost == "no more"
    assert len(news) == 1


def test_a_stream_that_ends_without_permission_is_opened_again(fake, connect):
    client = connect()
    fake.cut(grpc.StatusCode.PERMISSION_DENIED)
    eventually(lambda: client.counters.reconnects == 1 and client.lost is None)


def test_a_full_service_is_tried_again(fake, connect):
    fake.server.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    news = []
    client = connect(required=False, on_lost=news.append)
    eventually(lambda: news == ["full"])
    fake.server.refusal = None
    eventually(lambda: client.lost is None)
    assert news == ["full"]


def test_an_engine_can_start_without_its_service(connect, socket_address):
    news = []
    client = connect(required=False, on_lost=news.append)
    client.start(1, array([5]))
    assert draft_of(client, []) == []
    client.finish(1, array([6]))
    client.start(2, array([7]))
    eventually(lambda: news)
    with fake_server_thread(socket_address, FakeService(counting)) as fake:
        eventually(lambda: client.lost is None)
        assert client.draft(progress_of({2: []}, limit=1)).tokens.tolist() == [8]
        eventually(lambda: [5, 6] in fake.service.learned.values())
        assert len(news) == 1
        assert client.counters.reconnects == 0
        client.close()


def test_the_end_of_a_loss_is_reported_once(fake, connect):
    news = []
    client = connect(on_lost=lambda _: news.append("lost"), on_resumed=lambda: news.append("resumed"))
    client.start(1, array([5]))
    for _ in range(2 * GOOD_RESPONSES):
        assert draft_of(client, []) == [6]
    assert news == []
    fake.cut()
    eventually(lambda: client.lost is None and client.counters.reconnects == 1)
    eventually(lambda: draft_of(client, []) == [6] and news == ["lost", "resumed"])
    for _ in range(2 * GOOD_RESPONSES):
        assert draft_of(client, []) == [6]
    assert news == ["lost", "resumed"]


def test_the_first_connection_of_an_engine_that_started_without_its_service_is_reported(connect, socket_address):
    news = []
    client = connect(required=False, on_lost=news.append, on_resumed=lambda: news.append("resumed"))
    client.start(1, array([5]))
    lost = ["nothing answers there: No such file or directory"]
    eventually(lambda: news == lost)
    with fake_server_thread(socket_address, FakeService(counting)):
        eventually(lambda: draft_of(client, []) == [6] and news == [*lost, "resumed"])
        client.close()


def test_no_service_at_the_address(connect, socket_address, monkeypatch):
    monkeypatch.setattr("drafter_service.client.client.CONNECT_TIMEOUT_S", 0.2)
    news = []
    with pytest.raises(UserError, match=f"no drafter answers at {socket_address}; start one with: ssd-drafter serve"):
        connect(on_lost=news.append)
    assert not news  # The error has the reason.


def test_another_server_at_the_address(connect, socket_address):
    from concurrent.futures import ThreadPoolExecutor

    server = grpc.server(ThreadPoolExecutor(1))
    server.add_insecure_port(socket_address)
    server.start()
    with pytest.raises(UserError, match=r"something other than a drafter \(.*\) answers"):
        connect()
    server.stop(None)


def garbled(response: pb.DraftResponse) -> pb.DraftResponse:
    response.drafts.offsets = b"123"
    return response


def out_of_step(response: pb.DraftResponse) -> pb.DraftResponse:
    if not response.HasField("welcome"):
        response.step += 1
    return response


def test_after_violations_of_the_protocol_only_drafts_are_missing(fake, connect):
    client = connect()
    client.start(1, array([5]))
    fake.server.distort = garbled
    assert draft_of(client, []) == []
    assert client.counters.malformed == 1
    fake.server.distort = out_of_step
    eventually(lambda: draft_of(client, []) == [] and client.counters.reconnects)
    fake.server.distort = lambda response: response
    eventually(lambda: draft_of(client, []) == [6])
    assert fake.service.texts() == [[5]]


class Failing:
    """Replaces a function: raises an exception `times` times, then calls it."""

    def __init__(self, function, problem, times=2):
        self.function, self.problem, self.times = function, problem, times

    def __call__(self, *args, **kwargs):
        if self.times:
            self.times -= 1
            raise self.problem
        return self.function(*args, **kwargs)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "this process cannot connect: Too many open files"),
        (RuntimeError("can't start new thread"), "this client failed: RuntimeError"),
    ],
)
@pytest.mark.parametrize("place", ["_open", "_watch"])
def test_the_client_recovers_from_a_failure_to_connect(fake, connect, problem, reason, place):
    client = connect()
    client.start(1, array([5]))
    assert draft_of(client, []) == [6]
    failing = Failing(getattr(client, place), problem)
    setattr(client, place, failing)
    seen = set()
    with capture_logs() as logs:
        fake.cut()
        eventually(lambda: seen.add(client.lost) or not failing.times)
        eventually(lambda: client.lost is None and draft_of(client, []) == [6])
    assert reason in seen
    assert [log["problem"] for log in logs] == [type(problem).__name__] * 2


def test_an_exception_in_on_lost_is_logged_and_ignored(fake, connect):
    news = []

    def fail(reason):
        news.append(reason)
        raise RuntimeError("secret")

    client = connect(on_lost=fail)
    with capture_logs() as logs:
        fake.cut()
        eventually(lambda: news)
        eventually(lambda: client.counters.reconnects == 1 and client.lost is None)
    assert logs == [{"event": "on_lost raised", "log_level": "error", "problem": "RuntimeError"}]


def test_an_exception_in_on_resumed_is_logged_and_ignored(fake, connect):
    def fail():
        raise RuntimeError("secret")

    client = connect(on_resumed=fail)
    client.start(1, array([5]))
    with capture_logs() as logs:
        fake.cut()
        eventually(lambda: draft_of(client, []) == [6] and logs)
    assert logs == [{"event": "on_resumed raised", "log_level": "error", "problem": "RuntimeError"}]


def test_on_lost_may_close_the_client(fake, connect):
    problems = []

    def close(_):
        try:
            client.close()
        except Exception as problem:
            problems.append(problem)
        else:
            problems.append(None)

    client = connect(on_lost=close)
    fake.cut()
    client._thread.join(TIMEOUT_S)
    assert not client._thread.is_alive()
    assert problems == [None]


def test_the_transport_is_reported(fake, connect):
    client = connect()
    assert client.transport == ("socket" if fake.server.has_steps else "grpc")
    fake.stop()
    eventually(lambda: client.lost is not None)
    assert client.transport == ""


BAD_FRAMES = {
    "no response": (framed(b"\xff" * 4), "a frame does not hold a DraftResponse"),
    "no end": (struct.pack("<I", 4 | 1 << 31) + b"\xff" * 4, "a frame does not hold a Error"),
    "too long": (struct.pack("<I", 0x7FFF_FFFF), "a frame has 2147483647 bytes; the maximum is 67108864"),
}


@contextmanager
def answering(address, data):
    """Answer every stream over the step socket with the same bytes; yield the handshakes that arrived."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address.removeprefix("unix:") + ".steps")
    listening.listen()
    hellos = []

    def serve():
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection:
                    connection.settimeout(TIMEOUT_S)
                    frames, bodies = Frames(), []
                    connection.recv(len(MAGIC), socket.MSG_WAITALL)
                    while len(bodies) < 2:
                        bodies += [body for body, _ in frames.feed(connection.recv(1 << 16))]
                    hellos.append(pb.DraftRequest.FromString(bodies[1]).hello)
                    connection.sendall(data)
                    connection.recv(1)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield hellos
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join(TIMEOUT_S)


@pytest.mark.parametrize("kind", BAD_FRAMES)
def test_bytes_that_are_no_valid_frames_end_the_stream(socket_address, connect, kind):
    data, reason = BAD_FRAMES[kind]
    with answering(socket_address, data) as hellos:
        client = connect(required=False)
        eventually(lambda: len(hellos) >= 2 and client.lost == f"it and this client disagree: {reason}")
        client.close()


def test_close_sends_queued_ends_and_is_not_reported_as_a_loss(fake, connect):
    news = []
    client = connect(on_lost=news.append)
    client.start(1, array([5]))
    client.start(2, array([6]))
    client.finish(2, array([7]))
    client.close()
    assert not client._thread.is_alive()
    assert list(fake.service.learned.values()) == [[6, 7]]
    assert fake.service.counters is not None
    assert not news


def test_closing_does_not_wait_for_a_late_service(fake, connect, monkeypatch):
    monkeypatch.setattr("drafter_service.client.client.CLOSE_TIMEOUT_S", TIMEOUT_S)
    client = connect(deadline_s=0.0)
    client.start(1, array([5]))
    fake.pause()
    draft_of(client, [])
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < TIMEOUT_S / 2
    assert not client._thread.is_alive()
    fake.resume()


def test_waits_between_attempts_are_random_parts_of_a_doubling_interval():
    class Longest(Random):
        def uniform(self, low, high):
            assert low == 0
            return high

    def respond(times):
        for _ in range(times):
            state.response_received()

    gone = StreamEnd("gone")
    state = ConnectionState(Longest())
    waits = [state.ended(gone)[0] for _ in range(100)]
    assert waits[:4] == [FIRST_BACKOFF_S * factor for factor in (1, 2, 4, 8)]
    assert max(waits) == waits[-1] == LONGEST_BACKOFF_S
    for _ in range(2):  # A stream that fails after a few responses does not shorten the waits.
        respond(GOOD_RESPONSES - 1)
        assert state.ended(gone) == (LONGEST_BACKOFF_S, None)
    respond(GOOD_RESPONSES)
    assert state.ended(gone) == (FIRST_BACKOFF_S, "gone")
    first, second = ([ConnectionState(Random(seed)).ended(gone)[0] for seed in (1, 2)] for _ in range(2))
    assert first == second
    assert first[0] != first[1]
