"""The real server in its own process, over real sockets."""

import itertools
import signal
import tempfile
from contextlib import contextmanager
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from drafter_service.client import DrafterClient
from tests.drafter_service.raw import eventually
from tests.replay import progress_of, replay_one
from tests.servers import served
from tests.ssd.test_drafter import TEXT
from tests.strategies import array

SERVICE = "ssd.drafter.v1.DrafterService"
numbers = itertools.count()


@pytest.fixture(scope="module")
def service():
    """Yield a server that no test stops."""
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        address = f"unix:{folder}/drafter.sock"
        with served("--listen", address, "--capacity", "100k") as process:
            yield SimpleNamespace(address=address, process=process)


@pytest.fixture
def client(service):
    """Yield a client of the server with a separate namespace."""
    with DrafterClient(service.address, deadline_s=10, namespace=f"test-{next(numbers)}") as client:
        yield client


@contextmanager
def suspended(process):
    """Stop a process from running within the block."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def assert_learned(client, prompt=TEXT[:50], output=TEXT[50:]):
    """Assert that the client soon drafts nearly all of an output."""
    sequence_ids = itertools.count(100)
    eventually(lambda: replay_one(client, next(sequence_ids), prompt, output, learn=False) <= 20)
    assert client.lost is None


def test_a_service_learns_over_its_stream(client):
    assert replay_one(client, 0, TEXT[:50], TEXT[50:]) > 200
    assert_learned(client)


def test_health(service):
    with grpc.insecure_channel(service.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in (SERVICE, ""):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10, wait_for_ready=True)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_text_committed_while_the_service_was_late_is_learned(service, client):
    client._deadline_s = 0.0
    with suspended(service.process):
        client.start(1, TEXT[:50])
        for start in range(50, 300, 10):
            client.draft(progress_of({1: TEXT[start : start + 10]}, limit=1))
        client.finish(1, array([]))
    client._deadline_s = 10
    assert_learned(client, TEXT[40:60], TEXT[60:290])
