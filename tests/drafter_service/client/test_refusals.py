"""Clients that no service serves: refused, without permission, or nothing at the address."""

import time

import grpc
import pytest

from drafter_service.client import DrafterClient
from ssd.errors import UserError
from tests.drafter_service.fake_server import TIMEOUT_S, draft_of
from tests.drafter_service.raw import eventually
from tests.strategies import array

FINAL = [
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.INVALID_ARGUMENT,
]


@pytest.mark.parametrize("code", FINAL)
def test_a_refusal_is_final_and_reported_once(fake, connect, code, socket_address, monkeypatch):
    monkeypatch.setattr("drafter_service.client.client.CONNECT_TIMEOUT_S", TIMEOUT_S)
    fake.refusal = (code, "not you")
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


@pytest.mark.parametrize(
    ("argument", "value"), [("deadline_s", -1.0), ("poll_s", float("nan")), ("draft_shape", "list"), ("engine", "a b")]
)
def test_arguments_outside_their_range_are_refused(socket_address, argument, value):
    with pytest.raises(ValueError, match=f"^{argument} (must be .*, not |.* is not a name of an engine)"):
        DrafterClient(socket_address, **{argument: value})


def test_a_refusal_is_final_after_a_lost_connection_and_not_as_the_end_of_a_stream(fake, connect):
    news = []
    client = connect(on_lost=news.append)
    fake.cut(grpc.StatusCode.PERMISSION_DENIED)
    eventually(lambda: client.counters.reconnects == 1 and client.lost is None)
    fake.refusal = (grpc.StatusCode.PERMISSION_DENIED, "no more")
    fake.cut()
    client._thread.join(TIMEOUT_S)
    assert not client._thread.is_alive()
    assert client.lost == "no more"
    assert len(news) == 1


def test_a_full_service_is_tried_again(fake, connect):
    fake.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    news = []
    client = connect(required=False, on_lost=news.append)
    eventually(lambda: news == ["full"])
    fake.refusal = None
    eventually(lambda: client.lost is None)
    assert news == ["full"]


def test_no_service_at_the_address(connect, socket_address, monkeypatch):
    monkeypatch.setattr("drafter_service.client.client.CONNECT_TIMEOUT_S", 0.2)
    news = []
    with pytest.raises(UserError, match=f"no drafter answers at {socket_address}.*; start one with: ssd-drafter serve"):
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
