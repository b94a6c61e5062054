"""The real server tells engines apart: connected or not, late steps, in metrics and reports; and policy versions."""

import json
import socket
import urllib.request
from contextlib import contextmanager

import grpc
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from drafter_service.client import DrafterClient
from drafter_service.commands.main import cli
from drafter_service.settings.tree import ReportsConfig
from drafter_service.stubs import drafter_pb2 as pb
from ssd import DrafterConfig
from ssd.types import Progress
from tests.drafter_service.raw import batch, connected, eventually, start
from tests.servers import serving
from tests.strategies import array

LATE = 30
"""Late steps of the engine that waits for no answer."""


class Service:
    """The addresses of a running service."""

    def __init__(self, address, metrics):
        self.address = address
        self._metrics = metrics

    def engines(self, metric):
        """Return the values of a metric by host and engine."""
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return {
            (sample.labels["host"], sample.labels["engine"]): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"ssd_drafter_engine_{metric}"
        }

    def run(self, *arguments):
        """Return the output of a command for this service."""
        done = CliRunner().invoke(cli, [*arguments, "--address", self.address])
        assert done.exit_code == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        metrics = f"127.0.0.1:{free.getsockname()[1]}"
    address = f"unix:{tmp_path_factory.mktemp('e')}/drafter.sock"
    drafting, reports = DrafterConfig(capacity=100_000), ReportsConfig(metrics=metrics)
    with serving(listen=address, drafting=drafting, reports=reports):
        yield Service(address, metrics)


@contextmanager
def engine(service, host, name, **settings):
    with DrafterClient(service.address, namespace="n", host=host, engine=name, **settings) as client:
        client.start(1, array([5, 6, 7, 5, 6, 7, 5]))
        yield client


def step(client, token):
    return client.draft(Progress.of_one(1, array([token]), max_draft=2))


def test_engines_are_told_apart(service):
    """One engine gets its drafts, and the other never waits for them; then one disconnects."""
    vllm, sglang = ("vllm", "node-1:1"), ("sglang", "node-1:2")
    with engine(service, "sglang/0.5.23", "node-1:2", deadline_s=30.0) as prompt:
        with engine(service, "vllm/0.32.0", "node-1:1", deadline_s=0.0) as late:
            assert len(step(prompt, 6).tokens)
            steps = 0
            while late.counters.timeouts < LATE:  # Some answers arrive although it does not wait.
                steps += 1
                step(late, 6)
            # The counters of a client are sent when it is closed, once the last answer has arrived.
            eventually(lambda: late.counters.dropped and not late._protocol.pending.has_pending)
            timeouts = late.counters.timeouts
            assert service.engines("connected") == {vllm: 1, sglang: 1}
        eventually(lambda: service.engines("connected") == {vllm: 0, sglang: 1})
        assert service.engines("late_steps_total") == {vllm: timeouts, sglang: 0}
        assert service.engines("steps_total") == {vllm: steps, sglang: 1}
        committed = service.engines("committed_tokens_total")
        assert committed[sglang] == service.engines("sequence_steps_total")[sglang] == 1
        assert committed[vllm] <= steps

        [namespace] = json.loads(service.run("report", "--json"))["namespaces"]
        rows = {each["engine"]: each for each in namespace["by_client"]}
        assert rows["node-1:1"]["client"].startswith("vllm/0.32.0 ssd-drafter/")
        assert (rows["node-1:1"]["streams"], rows["node-1:2"]["streams"]) == (0, 1)
        assert (rows["node-1:2"]["offered"], rows["node-1:2"]["drafted"]) == (2, 0)
        assert (rows["node-1:1"]["late_steps"], rows["node-1:1"]["late_share"]) == (timeouts, timeouts / steps)


def test_engines_without_a_name_are_named_after_their_process_or_not_at_all(service):
    with engine(service, "host/1", "", deadline_s=30.0), connected(service.address) as caller:
        stream = caller.stream()
        stream.exchange(hello=pb.Hello(protocol=3, client="other/1", namespace="other"))
        assert stream.draft(1, starts=[start(1, [5, 6, 5])], limit=2) == [6, 5]
        names = {host: name for host, name in service.engines("connected") if host in ("host", "other")}
    assert names["host"].partition(":")[2].isdigit()
    assert names["other"] == ""


@pytest.mark.parametrize("name", ["a b", 'a"b', "a\n", "é", "x" * 129])
def test_an_invalid_name_is_refused_and_changes_nothing(service, name):
    before = service.engines("connected")
    with connected(service.address) as caller:
        stream = caller.stream()
        stream.send(hello=pb.Hello(protocol=3, client="bad/1", engine=name, namespace="bad"), batch=batch({1: ()}))
        status, details = stream.refusal()
        assert status is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith("hello.engine ")
        assert "is not a name of an engine" in details
        assert "bad" not in [each.name for each in caller.call("ListNamespaces").namespaces]
    assert service.engines("connected") == before
    with pytest.raises(ValueError, match="is not a name of an engine"):
        DrafterClient(service.address, engine=name)
