"""The parts of the cluster benchmark with logic of their own: requests, processes, lost texts, figures."""

import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice

import grpc
import numpy as np
import psutil
import pytest

from benchmarks import soak
from benchmarks.cluster import __main__ as command
from benchmarks.cluster.nodes import ManagedProcess, Usage
from benchmarks.cluster.texts import Acknowledged, SentTexts, namespace_name, unique_texts
from benchmarks.cluster.traffic import Traffic, read_totals, tokens_per_step
from benchmarks.support.load import observe
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
from tests.drafter_service.raw import eventually
from tests.redis import free_port
from tests.servers import served


class Engine(BaseHTTPRequestHandler):
    """Answers every prompt alike with the server's `status`; None: it ends connections without an answer."""

    def do_POST(self):
        self.server.received += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.status is not None:
            content = b'{"choices": [{"text": "output"}]}'
            self.send_response(self.server.status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *_arguments):
        """Print nothing."""


@contextmanager
def engine(status=200):
    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        server.received, server.status = 0, status
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_requests_go_to_the_engines_in_turn_and_are_timed_from_when_they_were_due():
    with engine() as one, engine() as other:
        sent = Traffic([one.server_port, other.server_port], rate=1000)
        sent.run(["a", "b", "c", "d"])
    assert one.received == other.received == 2
    assert sent.failures == []
    due = sorted(record.due for record in sent.records)
    assert [each - due[0] for each in due] == pytest.approx([0, 0.001, 0.002, 0.003], abs=1e-7)


@pytest.mark.parametrize(
    ("status", "failure", "received"),
    [(None, "", 3), (503, "", 3), (500, "ValueError: status 500", 2)],
)
def test_a_request_goes_to_another_engine_unless_one_answers_with_an_error(status, failure, received):
    with engine() as working, engine(status) as other:
        sent = Traffic([free_port(), other.server_port, working.server_port], rate=1000)
        sent.run(["a", "b", "c"])
    assert [each.startswith(failure) for each in sent.failures] == ([True, True] if failure else [])
    assert working.received == (1 if failure else received)


def test_a_request_fails_if_no_engine_answers():
    sent = Traffic([free_port(), free_port()], rate=1000)
    assert sent.run(["a"]) == 0
    assert sent.failures[0].startswith("ConnectionRefusedError")
    assert read_totals(free_port()).tolist() == [0, 0]


def test_a_process_is_killed_with_its_children_and_keeps_its_processor_time(tmp_path):
    child = tmp_path / "child"
    busy = f"import os, time; sum(range(10**7)); open({str(child)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    child.touch()
    process = ManagedProcess("parent", [sys.executable, "-c", parent], tmp_path / "log", lambda: child.read_text())
    process.start()
    process.await_ready()
    used = process.usage()
    assert used.memory_bytes > 0
    assert used.threads == 2
    process.end()
    eventually(lambda: not psutil.pid_exists(int(child.read_text())))
    assert process.usage() == Usage(pytest.approx(used.cpu_s, abs=1), 0, 0, 0)
    assert process.usage().cpu_s >= used.cpu_s > 0


def test_a_process_that_ends_is_not_ready(tmp_path):
    process = ManagedProcess("broken", [sys.executable, "-c", "1/0"], tmp_path / "log", lambda: False)
    process.start()
    with pytest.raises(SystemExit, match=r"broken did not start; see .*log"):
        process.await_ready()
    assert "ZeroDivisionError" in (tmp_path / "log").read_text()


class Node:
    def __init__(self, address):
        self.name, self.address = "a", address

    @contextmanager
    def stub(self):
        with grpc.insecure_channel(self.address) as channel:
            yield DrafterServiceStub(channel)


def test_acknowledged_texts_that_a_sidecar_does_not_draft_are_lost(tmp_path):
    kept, lost, excused = islice(unique_texts(0), 3)
    with served("--listen", f"unix:{tmp_path}/drafter.sock", "--capacity", "300k"):
        node = Node(f"unix:{tmp_path}/drafter.sock")
        with node.stub() as stub:
            observe(stub, namespace_name(), [kept])
        sent = SentTexts([node], 1)
        sent.acknowledged += [Acknowledged(text, node, time) for time, text in enumerate((kept, lost, excused))]
        assert [(name, each.time) for name, each in sent.lost(0.5, lambda each: each.time == 2)] == [("a", 1)]


def test_targets_count_faults_without_effect_and_without_recovery():
    faults = [(0, True, 0.0), (0, False, 20.0), (2, True, None)]
    document = {
        "mixed": {"ratio": 1.0, "failed": 0},
        "delay_ms": {"p99": 10},
        "failed": 0,
        "different_outputs": 1,
        "faults": [dict(zip(("lost", "took_effect", "recovered_s"), fault, strict=True)) for fault in faults],
    }
    rows = command.targets(document)
    assert {row["name"]: row["value"] for row in rows if not row["met"]} == {
        "outputs that differ from the first one of their prompt": 1,
        "acknowledged texts lost": 2,
        "faults without effect": 1,
        "faults without recovery within a minute": 1,
    }
    assert rows[-1]["value"] == 20


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([[0, 0]], [[20, 15]], 4),
        ([[0, 0], [5, 3]], [[15, 12], [10, 6]], 4),
        ([[30, 10]], [[20, 15]], 4),  # It has started again.
        ([[3, 1]], [[3, 1]], 0),
    ],
)
def test_each_step_gives_one_token_more_than_were_accepted(before, after, expected):
    assert tokens_per_step([*map(np.array, before)], [*map(np.array, after)]) == expected


def test_a_process_is_compared_by_mean_memory_and_by_the_least_number_of_threads():
    def sample(time, memory, threads, cpu_s):
        return soak.Sample(time, {"engine": Usage(cpu_s, memory, threads, 10)}, 0)

    first = [sample(0, 100e6, 5, 1.0), sample(10, 100e6, 9, 2.0)]
    last = [sample(50, 101e6, 6, 8.0), sample(60, 103e6, 6, 8.5)]
    compared = soak.process_figures("engine", [first, last])
    assert (compared["memory_mb"], compared["growth"]) == ([100, 102], 0.02)
    assert (compared["threads"], compared["cores"]) == ([5, 6], [0.1, 0.05])


def test_a_run_that_is_too_short_to_compare_its_parts_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["soak", "--minutes", "1"])
    with pytest.raises(SystemExit):
        soak.main()
    assert "--minutes must be at least 2" in capsys.readouterr().err
