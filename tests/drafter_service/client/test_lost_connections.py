"""Connections that are lost, restored and reported."""

import errno
import threading
import time
from random import Random

import pytest
from structlog.testing import capture_logs

from drafter_service.client.connection import (
    FIRST_BACKOFF_S,
    GOOD_RESPONSES,
    LONGEST_BACKOFF_S,
    ConnectionState,
    StreamEnd,
)
from drafter_service.stubs import drafter_pb2 as pb
from ssd.errors import UserError
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
    assert client.transport == ("socket" if fake.has_steps else "grpc")
    fake.stop()
    eventually(lambda: client.lost is not None)
    assert client.transport == ""
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
    client = connect(required=False, on_lost=news.append, on_resumed=lambda: news.append("resumed"))
    client.start(1, array([5]))
    assert draft_of(client, []) == []
    client.finish(1, array([6]))
    client.start(2, array([7]))
    lost = ["No such file or directory"]
    eventually(lambda: news == lost)
    with fake_server_thread(socket_address, FakeService(counting)) as fake:
        eventually(lambda: client.lost is None)
        assert client.draft(progress_of({2: []}, limit=1)).tokens.tolist() == [8]
        eventually(lambda: [5, 6] in fake.service.learned.values())
        assert client.counters.reconnects == 0
        eventually(lambda: client.draft(progress_of({2: []}, limit=1)).tokens.tolist() and news == [*lost, "resumed"])
        client.close()


def test_the_first_welcome_and_the_end_of_a_loss_are_reported_once(fake, connect):
    news = []
    client = connect(
        namespace="a",
        on_welcome=lambda welcome: news.append((welcome.namespace, str(welcome.namespace_state))),
        on_lost=lambda _: news.append("lost"),
        on_resumed=lambda: news.append("resumed"),
    )
    client.start(1, array([5]))
    for _ in range(2 * GOOD_RESPONSES):
        assert draft_of(client, []) == [6]
    eventually(lambda: news == [("a", "a")])  # The client's thread may be about to report it.
    fake.cut()
    eventually(lambda: client.lost is None and client.counters.reconnects == 1)
    eventually(lambda: draft_of(client, []) == [6] and news == [("a", "a"), "lost", "resumed"])
    for _ in range(2 * GOOD_RESPONSES):
        assert draft_of(client, []) == [6]
    assert news == [("a", "a"), "lost", "resumed"]


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
    fake.distort = garbled
    assert draft_of(client, []) == []
    assert client.counters.malformed == 1
    fake.distort = out_of_step
    eventually(lambda: draft_of(client, []) == [] and client.counters.reconnects)
    fake.distort = lambda response: response
    eventually(lambda: draft_of(client, []) == [6])
    assert fake.service.texts() == [[5]]


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
    seen, work = [], getattr(client, place)

    def fail_twice():
        seen.append(client.lost)
        if len(seen) <= 2:
            raise problem
        return work()

    setattr(client, place, fail_twice)
    with capture_logs() as logs:
        fake.cut()
        eventually(lambda: len(seen) > 1)
        eventually(lambda: client.lost is None and draft_of(client, []) == [6])
    assert reason in seen
    assert [log["problem"] for log in logs] == [type(problem).__name__] * 2


def test_exceptions_in_callbacks_are_logged_and_ignored(fake, connect):
    def fail(*_):
        raise RuntimeError("secret")

    client = connect(on_lost=fail, on_resumed=fail)
    client.start(1, array([5]))
    with capture_logs() as logs:
        fake.cut()
        eventually(lambda: draft_of(client, []) == [6] and len(logs) == 2)
        eventually(lambda: client.counters.reconnects == 1 and client.lost is None)
    assert logs == [
        {"event": f"{name} raised", "log_level": "error", "problem": "RuntimeError"}
        for name in ("on_lost", "on_resumed")
    ]


def test_on_lost_may_close_the_client(fake, connect):
    closed = []

    def close(_):
        client.close()
        closed.append(True)

    client = connect(on_lost=close)
    fake.cut()
    client._thread.join(TIMEOUT_S)
    assert not client._thread.is_alive()
    assert closed


def test_waits_between_attempts_are_random_parts_of_a_doubling_interval():
    class Longest(Random):
        def uniform(self, low, high):
            assert low == 0
            return high

    def respond(times):
        for _ in range(times):
            state.response_received()

    gone = StreamEnd("gone", UserError("gone"))
    state = ConnectionState("host:1", Longest())
    waits = [state.ended(gone)[0] for _ in range(100)]
    assert waits[:4] == [FIRST_BACKOFF_S * factor for factor in (1, 2, 4, 8)]
    assert max(waits) == waits[-1] == LONGEST_BACKOFF_S
    for _ in range(2):  # A stream that fails after a few responses does not shorten the waits.
        respond(GOOD_RESPONSES - 1)
        assert state.ended(gone) == (LONGEST_BACKOFF_S, None)
    respond(GOOD_RESPONSES)
    assert state.ended(gone) == (FIRST_BACKOFF_S, "gone")
    first, second = ([ConnectionState("host:1", Random(seed)).ended(gone)[0] for seed in (1, 2)] for _ in range(2))
    assert first == second
    assert first[0] != first[1]
