"""Connections that are lost, restored and reported."""

import errno
import socket
import struct
import threading
import time
from contextlib import contextmanager, suppress

import pytest
from structlog.testing import capture_logs

from drafter_service.client.connection import GOOD_RESPONSES
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import MAGIC, Frames, framed
from tests.drafter_service.client_wire import counting
from tests.drafter_service.fake_server import TIMEOUT_S, FakeService, draft_of, fake_server_thread
from tests.drafter_service.raw import eventually
from tests.replay import progress_of
from tests.strategies import array


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
    lost = ["No such file or directory"]
    eventually(lambda: news == lost)
    with fake_server_thread(socket_address, FakeService(counting)):
        eventually(lambda: draft_of(client, []) == [6] and news == [*lost, "resumed"])
        client.close()


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


BAD_FRAMES = {
    "no response": (framed(b"\xff" * 4), "a message is not a DraftResponse"),
    "no end": (struct.pack("<I", 4 | 1 << 31) + b"\xff" * 4, "a frame does not hold an Error"),
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
