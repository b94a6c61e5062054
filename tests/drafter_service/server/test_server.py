"""The real server in its own process, over real sockets."""

import itertools
import re
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from drafter_service.client import DrafterClient
from drafter_service.stubs import drafter_pb2 as pb
from ssd.types import ROOT
from tests.drafter_service.raw import eventually
from tests.replay import progress_of, replay_one
from tests.servers import SERVE, served
from tests.ssd.test_drafter import TEXT
from tests.strategies import array

SERVICE = "ssd.drafter.v1.DrafterService"
numbers = itertools.count()


@pytest.fixture(scope="module")
def service():
    """Yield a server that no test stops."""
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        address = f"unix:{folder}/drafter.sock"
        with served("--listen", address, "--capacity", "100k", "--refresh-interval", "0.01") as process:
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


def failed_start(*arguments):
    """Return the exit code and the error of a server that cannot start."""
    ended = subprocess.run([*SERVE, *arguments], capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, ended.stderr


def assert_learned(client, prompt=TEXT[:50], output=TEXT[50:]):
    """Assert that the client soon drafts nearly all of an output."""
    sequence_ids = itertools.count(100)
    eventually(lambda: replay_one(client, next(sequence_ids), prompt, output, learn=False) <= 20)
    assert client.lost is None


def test_a_service_learns_over_its_stream(client):
    assert replay_one(client, 0, TEXT[:50], TEXT[50:]) > 200
    assert_learned(client)


def test_health_and_reflection(service):
    with grpc.insecure_channel(service.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in (SERVICE, ""):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10, wait_for_ready=True)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        listed, contract = stub.ServerReflectionInfo(iter(requests), timeout=10)
    assert SERVICE in [each.name for each in listed.list_services_response.service]
    assert pb.DESCRIPTOR.serialized_pb in contract.file_descriptor_response.file_descriptor_proto


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_service(socket_address, number):
    with served("--listen", socket_address) as process, DrafterClient(socket_address, deadline_s=10) as client:
        client.start(1, array([1, 2, 1]))
        assert client.draft(progress_of({1: []}, limit=1)).tokens.tolist() == [2]
        process.send_signal(number)
        output, errors = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "stopped;" in output
        assert "rror" not in errors
        eventually(lambda: client.lost)


def test_after_a_crash_of_the_service_only_drafts_are_missing(server, socket_address):
    with DrafterClient(socket_address, deadline_s=10) as client:
        client.start(1, array([1, 2, 1]))
        assert client.draft(progress_of({1: []}, limit=1)).tokens.tolist() == [2]
        server.kill()
        server.wait()
        eventually(lambda: client.lost is not None or len(client.draft(progress_of({1: []}, limit=1)).tokens) == 0)
        client.start(2, array([1]))
        assert len(client.draft(progress_of({1: [], 2: []}, limit=1))) == 2
        client.finish(1, array([]))


def test_the_socket_of_a_running_server_is_not_taken_over(service, client):
    code, error = failed_start("--listen", service.address)
    assert code == 2
    assert error.startswith("error: ")
    assert "is in use" in error
    assert error.count("\n") == 1
    assert client.draft(progress_of({}, limit=1)).tokens.tolist() == []
    assert client.lost is None


def test_a_port_in_use_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, error = failed_start("--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert code == 2
    assert "cannot listen at" in error
    assert "Traceback" not in error


def test_a_service_at_a_port_drafts_with_its_options():
    arguments = ("--draft-shape", "tree", "--cost", "0.0001", "--max-draft", "5")
    with served("--listen", "127.0.0.1:0", *arguments) as process:
        address = re.search(r"listening at (127\.0\.0\.1:\d+),", process.greeting)[1]
        assert not address.endswith(":0")
        with DrafterClient(address, deadline_s=10) as client:
            client.start(1, array([1, 2, 3, 1, 2, 4, 1, 2]))
            drafts = client.draft(progress_of({1: []}, limit=9))
            assert len(drafts.tokens) == 5
            assert {*drafts.tokens[drafts.parents == ROOT].tolist()} == {3, 4}
            assert len(client.draft(progress_of({1: []}, limit=9, cost=1.0)).tokens) == 0


def test_the_client_waits_once_for_a_hanging_service_and_uses_it_again_later(service, client):
    client._deadline_s = 0.5
    client.start(1, array([1, 2, 1]))
    with suspended(service.process):
        began = time.monotonic()
        for token in (2, 3, 4, 5, 2, 3):
            assert len(client.draft(progress_of({1: [token]}, limit=1)).tokens) == 0
        assert time.monotonic() - began < 4 * 0.5
        assert client.counters.timeouts == 6
    # No token that was committed in the meantime is missing.
    eventually(lambda: client.draft(progress_of({1: []}, limit=2)).tokens.tolist() == [4, 5])
    assert client.lost is None


def test_text_committed_while_the_service_was_late_is_learned(service, client):
    client._deadline_s = 0.0
    with suspended(service.process):
        client.start(1, TEXT[:50])
        for start in range(50, 300, 10):
            client.draft(progress_of({1: TEXT[start : start + 10]}, limit=1))
        client.finish(1, array([]))
    client._deadline_s = 10
    assert_learned(client, TEXT[40:60], TEXT[60:290])
