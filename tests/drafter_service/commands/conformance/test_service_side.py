"""The checks of a service: this project's service passes, and each planted fault fails the check that is about it."""

import pytest
from click.testing import CliRunner

from drafter_service.auth.connector import ClientAccess, Connector
from drafter_service.commands.conformance import service_side
from drafter_service.commands.conformance.service_side import GARBAGE, RULES, check_service
from drafter_service.commands.conformance.simulated_engine import RawStream
from drafter_service.commands.main import cli
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.address import Address
from ssd.errors import UserError
from tests.servers import served


@pytest.fixture(scope="module")
def address():
    """Yield the address of a service without a step socket."""
    with served("--listen", "127.0.0.1:0", "--capacity", "100k") as process:
        yield process.greeting.split()[3].rstrip(",")


def connector(address):
    return Connector(Address.parse(address), ClientAccess())


def test_the_service_passes_over_both_transports(socket_address, server):
    result = CliRunner().invoke(cli, ["conformance", "--connect", socket_address])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert all(line.startswith("pass  ") for line in lines)
    assert sum(line.startswith("pass  step socket, ") for line in lines) == len(RULES) == len(lines) / 2


def test_the_namespace_of_the_test_is_deleted(address):
    assert not check_service(connector(address)).failures
    assert "conformance-" not in CliRunner().invoke(cli, ["namespaces", "--address", address]).output


def doubled(response):
    """Draft each token twice."""
    for field in ("tokens", "parents", "accept_prob", "source"):
        setattr(response.drafts, field, 2 * getattr(response.drafts, field))
    response.drafts.offsets = response.drafts.offsets[:4] + (len(response.drafts.tokens) // 4).to_bytes(4, "little")


def without_drafts(response):
    if response.HasField("drafts"):
        count = len(response.drafts.offsets)
        response.drafts.CopyFrom(pb.Drafts(offsets=bytes(count)))


def without_error(response):
    if response.HasField("error"):
        response.drafts.SetInParent()


def always_learning(request):
    for start in request.starts:
        start.learn = True
    for finish in request.finishes:
        finish.learn = True


def later_parents(response):
    response.drafts.parents = b"\1\0\0\0" * (len(response.drafts.parents) // 4)


def changed_hello(field, value):
    return lambda request: request.HasField("hello") and setattr(request.hello, field, value)


FAULTS = {
    "another version": ("receive", lambda one: setattr(one.welcome, "protocol", 4), "welcome"),
    "drafts that are too long": ("receive", doubled, "limits"),
    "no drafts": ("receive", without_drafts, "drafts"),
    "no hints": ("send", lambda one: [start.ClearField("hints") for start in one.starts], "hints"),
    "parents after their children": ("receive", later_parents, "drafts"),
    "numbers of other requests": ("receive", lambda one: setattr(one, "step", one.step // 2), "order"),
    "no errors": ("receive", without_error, "invalid requests"),
    "errors without a sentence": ("receive", lambda one: one.error.ClearField("message"), "invalid requests"),
    "no lost sequences": ("receive", lambda one: one.ClearField("lost_ids"), "unknown sequences"),
    "private text that is learned": ("send", always_learning, "learning"),
    "any engine name": ("send", changed_hello("engine", ""), "refused hello"),
    "any version": ("send", changed_hello("protocol", 3), "refused hello"),
}


@pytest.mark.parametrize(("direction", "change", "check"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found(address, monkeypatch, direction, change, check):
    class ChangedStream(RawStream):
        def send(self, data):
            if direction == "send" and data != GARBAGE:
                request = pb.DraftRequest.FromString(data)
                change(request)
                data = request.SerializeToString()
            super().send(data)

        def receive(self):
            response = super().receive()
            if direction == "receive":
                change(response)
            return response

    monkeypatch.setattr(service_side, "RawStream", ChangedStream)
    monkeypatch.setattr(service_side, "LEARNING_TIMEOUT_S", 0.2)
    failures = check_service(connector(address)).failures
    assert failures.get(f"gRPC, {check}"), failures


def test_a_missing_service_is_an_error_of_the_user(socket_address):
    with pytest.raises(UserError, match="cannot be tested: No such file or directory"):
        check_service(connector(socket_address))
