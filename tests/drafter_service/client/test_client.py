"""The client over real sockets, against a service whose failures tests control, and without one."""

import os
import time

import grpc
import pytest

from drafter_service.client import DrafterClient
from drafter_service.client.protocol import NamespaceState, Welcome
from drafter_service.observability.facts import ModelIdentity
from ssd.errors import UserError
from tests.drafter_service.fake_server import TIMEOUT_S, draft_of, unpacked
from tests.drafter_service.raw import eventually
from tests.strategies import array


def test_a_stream_begins_with_the_handshake(fake, connect):
    model = ModelIdentity("org/model", "abc", "lora", 1000)
    connect(model=model, namespace="team-a", host="vllm/0.32.0")
    [request] = fake.service.requests
    hello = request.hello
    assert (hello.protocol, hello.namespace) == (3, "team-a")
    assert (hello.model.name, hello.model.tokenizer) == ("org/model", "abc")
    assert (hello.model.adapter, hello.model.vocab_size) == ("lora", 1000)
    assert hello.client.startswith("vllm/0.32.0 ssd-drafter/")
    assert hello.engine.endswith(f":{os.getpid()}")


def test_the_service_says_what_it_allows(fake, connect):
    fake.service.max_draft, fake.service.may_learn = 16, False
    assert connect(namespace="team-a").welcome == Welcome("team-a", False, 16, 0, 0, NamespaceState("team-a"))


def test_forgetting_needs_the_service(fake, connect):
    client = connect()
    with pytest.raises(UserError, match=r"the drafter at .* did not forget 'name': "):
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
