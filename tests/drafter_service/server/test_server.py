"""The real server in its own process, over real sockets."""

import re
import signal
import socket
import subprocess
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from drafter_service.client import DrafterClient
from drafter_service.stubs import drafter_pb2 as pb
from ssd.errors import UserError
from ssd.types import ROOT
from tests.drafter_service.raw import hello
from tests.replay import progress_of, replay_one
from tests.servers import SERVE, served
from tests.ssd.test_drafter import TEXT
from tests.strategies import array

SERVICE = "ssd.drafter.v1.DrafterService"
INVALID_ARGUMENT = 3
METHODS = (
    "Draft",
    "Observe",
    "Warm",
    "Forget",
    "Report",
    "Snapshot",
    "ListNamespaces",
    "DropNamespace",
)


def serve_in_vain(*arguments):
    """The exit code and the error of a server that cannot start."""
    ended = subprocess.run([*SERVE, *arguments], capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, ended.stderr


def assert_eventually(condition):
    """The server works in the background; ask until it has, for as long as a very slow machine may take."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until


def test_a_service_learns_over_its_stream(server, socket_address):
    client = DrafterClient(socket_address, deadline_s=10)
    first = replay_one(client, 0, TEXT[:50], TEXT[50:])
    assert first > 200
    sequence_ids = iter(range(1, 10_000))
    assert_eventually(lambda: replay_one(client, next(sequence_ids), TEXT[:50], TEXT[50:], learn=False) <= 20)
    assert client.lost is None
    client.close()


def test_health_and_reflection(server, socket_address):
    with grpc.insecure_channel(socket_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in (SERVICE, ""):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10, wait_for_ready=True)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        [reply] = reflection.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
        )
        assert SERVICE in [service.name for service in reply.list_services_response.service]


def test_a_malformed_request_is_refused_and_the_stream_continues(server, socket_address):
    messages = [
        pb.DraftRequest(hello=hello("default")).SerializeToString(),
        b"\xff\xff\xff",
        pb.DraftRequest(step=2, batch=pb.Batch(sequence_ids=b"123")).SerializeToString(),
        pb.DraftRequest(step=3, starts=[pb.Start(sequence_id=1)]).SerializeToString(),
    ]
    with grpc.insecure_channel(socket_address) as channel:
        raw = channel.stream_stream(f"/{SERVICE}/Draft", response_deserializer=pb.DraftResponse.FromString)
        _, garbage, wrong, right = raw(iter(messages), timeout=10, wait_for_ready=True)
    assert garbage.error.code == wrong.error.code == INVALID_ARGUMENT
    assert "not a DraftRequest" in garbage.error.message
    assert "batch.sequence_ids has 3 bytes" in wrong.error.message
    assert wrong.step == 2
    assert right.step == 3
    assert right.HasField("drafts")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_service(socket_address, number):
    with served("--listen", socket_address) as process:
        client = DrafterClient(socket_address, deadline_s=10)
        client.start(1, array([1, 2, 1]))
        assert client.draft(progress_of({1: []}, limit=1)).tokens.tolist() == [2]
        process.send_signal(number)
        output, errors = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "stopped:" in output
        assert "rror" not in errors
        assert_eventually(lambda: client.lost)
        client.close()


def test_a_dead_service_costs_drafts_and_nothing_else(server, socket_address):
    client = DrafterClient(socket_address, deadline_s=10)
    client.start(1, array([1, 2, 1]))
    assert client.draft(progress_of({1: []}, limit=1)).tokens.tolist() == [2]
    server.kill()
    server.wait()
    assert_eventually(lambda: client.lost is not None or len(client.draft(progress_of({1: []}, limit=1)).tokens) == 0)
    client.start(2, array([1]))
    assert len(client.draft(progress_of({1: [], 2: []}, limit=1))) == 2
    client.finish(1, array([]))
    client.close()


def test_with_a_deadline_of_zero_responses_are_late_and_dropped(server, socket_address):
    client = DrafterClient(socket_address, deadline_s=10)
    client.start(1, array([1, 2, 3, 1]))
    client._deadline_s = 0.0
    server.send_signal(signal.SIGSTOP)
    assert len(client.draft(progress_of({1: []}, limit=1)).tokens) == 0
    assert client.timeouts == 1
    server.send_signal(signal.SIGCONT)
    client._deadline_s = 10.0
    assert client.draft(progress_of({1: [2]}, limit=1)).tokens.tolist() in ([], [3])
    assert_eventually(lambda: client.draft(progress_of({1: []}, limit=1)).tokens.tolist() == [3])
    client.close()


def test_no_service_at_the_address(socket_address):
    address = socket_address
    with pytest.raises(UserError, match=f"no drafter answers at {address}; start one with: ssd-drafter serve"):
        DrafterClient(address)


def test_a_running_server_keeps_its_socket(server, socket_address):
    code, error = serve_in_vain("--listen", socket_address)
    assert code == 2
    assert error.startswith("error: ")
    assert "is in use" in error
    assert error.count("\n") == 1
    DrafterClient(socket_address, deadline_s=10).close()


def test_a_port_in_use_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, error = serve_in_vain("--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert code == 2
    assert "cannot listen at" in error
    assert "Traceback" not in error


def test_a_port_serves_as_a_socket_does():
    with served("--listen", "127.0.0.1:0") as process:
        address = re.search(r"listening at (127\.0\.0\.1:\d+),", process.greeting)[1]
        assert not address.endswith(":0")
        client = DrafterClient(address, deadline_s=10)
        client.start(1, array([1, 2, 1]))
        assert client.draft(progress_of({1: []}, limit=1)).tokens.tolist() == [2]
        client.close()


def test_a_service_drafts_with_its_options(socket_address):
    with served("--listen", socket_address, "--draft-shape", "tree", "--cost", "0.0001", "--max-draft", "5"):
        client = DrafterClient(socket_address, deadline_s=10)
        client.start(1, array([1, 2, 3, 1, 2, 4, 1, 2]))
        drafts = client.draft(progress_of({1: []}, limit=9))
        assert len(drafts.tokens) == 5
        assert {*drafts.tokens[drafts.parents == ROOT].tolist()} == {3, 4}
        assert len(client.draft(progress_of({1: []}, limit=9, cost=1.0)).tokens) == 0
        client.close()


def test_two_engines_learn_from_each_other_and_keep_their_sequences_apart(server, socket_address):
    first, second = (DrafterClient(socket_address, deadline_s=10) for _ in range(2))
    first.start(0, array([1, 2, 1]))
    second.start(0, array([3, 4, 3]))
    assert first.draft(progress_of({0: []}, limit=1)).tokens.tolist() == [2]
    assert second.draft(progress_of({0: []}, limit=1)).tokens.tolist() == [4]
    replay_one(first, 1, TEXT[:50], TEXT[50:])
    sequence_ids = iter(range(1, 10_000))
    assert_eventually(lambda: replay_one(second, next(sequence_ids), TEXT[:50], TEXT[50:], learn=False) <= 20)
    for client in (first, second):
        assert client.lost is None
        client.close()


def test_a_service_that_hangs_costs_one_deadline_and_is_used_again_later(server, socket_address):
    client = DrafterClient(socket_address, deadline_s=0.5)
    client.start(1, array([1, 2, 1]))
    server.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    for token in (2, 3, 4, 5, 2, 3):
        assert len(client.draft(progress_of({1: [token]}, limit=1)).tokens) == 0
    assert time.monotonic() - began < 4 * 0.5
    assert client.timeouts == 6
    server.send_signal(signal.SIGCONT)
    # No token that was committed meanwhile is missing.
    assert_eventually(lambda: client.draft(progress_of({1: []}, limit=2)).tokens.tolist() == [4, 5])
    assert client.lost is None
    client.close()


def test_text_committed_while_the_service_was_late_is_learned(server, socket_address):
    client = DrafterClient(socket_address, deadline_s=0.0)
    server.send_signal(signal.SIGSTOP)
    client.start(1, TEXT[:50])
    for start in range(50, 300, 10):
        client.draft(progress_of({1: TEXT[start : start + 10]}, limit=1))
    client.finish(1, array([]))
    server.send_signal(signal.SIGCONT)
    client._deadline_s = 10
    sequence_ids = iter(range(2, 10_000))
    assert_eventually(lambda: replay_one(client, next(sequence_ids), TEXT[40:60], TEXT[60:290], learn=False) <= 20)
    client.close()


def test_a_silent_service_is_reported_once(server, socket_address):
    reasons = []
    client = DrafterClient(socket_address, deadline_s=0.01, patience_s=0.0, on_lost=reasons.append)
    client.start(1, array([1, 2, 1]))
    server.send_signal(signal.SIGSTOP)
    for _ in range(3):
        assert len(client.draft(progress_of({1: []}, limit=1)).tokens) == 0
    assert_eventually(lambda: reasons)
    server.send_signal(signal.SIGCONT)
    assert_eventually(lambda: client.lost is None)
    assert len(reasons) == 1
    assert "has not answered for" in reasons[0]
    client.close()


def test_reflection_returns_the_contract(server, socket_address):
    """It is the contract in protos/."""
    with grpc.insecure_channel(socket_address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
        [reply] = stub.ServerReflectionInfo(iter([request]), timeout=10, wait_for_ready=True)
    assert pb.DESCRIPTOR.serialized_pb in reply.file_descriptor_response.file_descriptor_proto
    assert [method.name for method in pb.DESCRIPTOR.services_by_name["DrafterService"].methods] == list(METHODS)
