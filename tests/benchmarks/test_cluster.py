"""The parts of the cluster benchmark with logic of their own: requests, links, processes, faults, figures."""

import json
import socket
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from benchmarks import soak
from benchmarks.cluster import __main__ as command
from benchmarks.cluster import faults, traffic
from benchmarks.cluster.nodes import Link, ManagedProcess, Usage
from benchmarks.cluster.texts import Acknowledged, SentTexts, observe, unique_texts
from benchmarks.cluster.traffic import Meter, Traffic, read_totals, recovery, tokens_per_step
from tests.drafter_service.raw import eventually
from tests.redis import free_port
from tests.servers import served

TIMEOUT_S = 10


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
        sent.run(["a", "b", "c", "d"], threading.Event())
    assert one.received == other.received == 2
    assert sent.failures == []
    due = sorted(record.due for record in sent.records)
    assert [each - due[0] for each in due] == pytest.approx([0, 0.001, 0.002, 0.003], abs=1e-7)


@pytest.mark.parametrize("status", [None, 503])
def test_a_request_goes_to_another_engine_if_one_does_not_answer_or_is_loading(status):
    with engine() as working, engine(status) as other:
        sent = Traffic([free_port(), other.server_port, working.server_port], rate=1000)
        sent.run(["a", "b", "c"], threading.Event())
    assert sent.failures == []
    assert working.received == 3


def test_an_error_of_an_engine_is_a_failure():
    with engine() as working, engine(500) as other:
        sent = Traffic([other.server_port, working.server_port], rate=1000)
        sent.run(["a"], threading.Event())
    assert sent.failures[0].startswith("ValueError: status 500")
    assert working.received == 0


def test_a_request_fails_if_no_engine_answers():
    sent = Traffic([free_port(), free_port()], rate=1000)
    sent.run(["a"], threading.Event())
    assert sent.failures[0].startswith("ConnectionRefusedError")
    assert read_totals(free_port()) is None


def test_traffic_that_hangs_ends_the_run(monkeypatch):
    monkeypatch.setattr(command, "ROUNDS_TIMEOUT_S", -1)
    with pytest.raises(SystemExit, match="did not go through 2 rounds"):
        command.wait_for_rounds(SimpleNamespace(times=[]), 2)


def test_a_link_that_is_cut_holds_bytes_until_it_is_healed():
    listener = socket.create_server(("127.0.0.1", 0))
    link = Link(listener.getsockname()[1])
    with listener, link.running(), socket.create_connection(link.server_address, timeout=TIMEOUT_S) as end:
        other, _ = listener.accept()
        with other:
            end.sendall(b"one")
            assert other.recv(100) == b"one"
            link.is_whole.clear()
            end.sendall(b"two")
            other.settimeout(0.1)
            with pytest.raises(TimeoutError):
                other.recv(100)
            link.is_whole.set()
            other.settimeout(TIMEOUT_S)
            assert other.recv(100) == b"two"
            other.sendall(b"three")
            assert end.recv(100) == b"three"
            end.shutdown(socket.SHUT_WR)
            assert other.recv(100) == b""
    assert link.bytes == 11
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(link.server_address)


def test_a_process_is_killed_with_its_children_and_keeps_its_processor_time(tmp_path):
    child = tmp_path / "child"
    busy = f"import os, time; sum(range(10**7)); open({str(child)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    child.touch()
    process = ManagedProcess("parent", [sys.executable, "-c", parent], tmp_path, lambda: bool(child.read_text()))
    process.start()
    process.await_ready()
    used = process.usage()
    assert used.memory_bytes > 0
    assert used.threads == 2
    process.kill()
    eventually(lambda: not psutil.pid_exists(int(child.read_text())))
    assert process.usage() == Usage(pytest.approx(used.cpu_s, abs=1), 0, 0, 0)
    assert process.usage().cpu_s >= used.cpu_s > 0


def test_a_process_that_ends_is_not_ready(tmp_path):
    process = ManagedProcess("broken", [sys.executable, "-c", "1/0"], tmp_path, lambda: False)
    process.start()
    with pytest.raises(SystemExit, match=r"broken did not start; see .*log"):
        process.await_ready()
    assert "ZeroDivisionError" in (tmp_path / "broken.log").read_text()


def test_acknowledged_texts_that_a_sidecar_does_not_draft_are_lost(tmp_path):
    address = f"unix:{tmp_path}/drafter.sock"
    kept, lost, excused = islice(unique_texts(0), 3)
    with served("--listen", address, "--capacity", "300k"):
        node = SimpleNamespace(name="a", address=address)
        assert observe(address, kept)
        sent = SentTexts([node], 1)
        sent.acknowledged += [Acknowledged(text, node, time) for time, text in enumerate((kept, lost, excused))]
        assert [(name, each.time) for name, each in sent.lost(0.5, lambda each: each.time == 2)] == [("a", 1)]
    assert not observe(address, kept)


def test_only_what_a_sidecar_acknowledged_just_before_its_kill_is_excused(monkeypatch):
    monkeypatch.setattr(faults, "DOWN_S", 0.2)
    monkeypatch.setattr(faults, "time", SimpleNamespace(monotonic=lambda: 100.0))
    node, other = SimpleNamespace(sidecar=SimpleNamespace(restart=lambda _pause_s: None)), SimpleNamespace()
    outcome = faults.kill_sidecar(SimpleNamespace(nodes=[node, other]))
    texts = {(of is node, time): Acknowledged(None, of, time) for of in (node, other) for time in (40, 99.95, 100.3)}
    assert [place for place, text in texts.items() if outcome.excuses(text)] == [(True, 99.95)]


def test_a_clock_jump_takes_effect_if_the_sidecar_sees_it():
    assert faults.are_jumps([0, 3599, -3601, 0])
    assert not faults.are_jumps([0, 0, 0, 0])


def test_targets_count_faults_without_effect_and_without_recovery():
    fault = {"lost": 0, "took_effect": True}
    document = {
        "mixed": {"ratio": 1.0, "failed": 0},
        "delay_ms": {"p99": 10},
        "failed": 0,
        "different_outputs": 1,
        "faults": [
            {**fault, "seconds": 0.0},
            {**fault, "seconds": 20.0, "took_effect": False},
            {**fault, "seconds": None},
            fault,
            {"skipped": "no disk"},
        ],
    }
    rows = command.targets(document)
    assert {row["name"]: row["value"] for row in rows if not row["met"]} == {
        "outputs that differ from the first one of their prompt": 1,
        "faults without effect": 1,
        "faults without recovery within a minute": 2,
    }
    assert rows[-1]["value"] == 20
    json.dumps(rows, allow_nan=False)


def test_each_step_gives_one_token_more_than_were_accepted():
    assert tokens_per_step(np.array([[15, 12], [5, 3]])) == tokens_per_step(np.array([20, 15])) == 4
    assert tokens_per_step(np.zeros(2)) is None


def test_an_engine_that_has_started_again_is_counted_from_its_start(monkeypatch):
    answers = iter([(20, 8), (30, 10), None, (5, 1), (6, 1)])
    monkeypatch.setattr(traffic, "read_totals", lambda _port: None if (it := next(answers)) is None else np.array(it))
    meter = Meter([1])
    for _ in range(5):
        meter.sample()
    assert [total.tolist() for total in meter.totals] == [[[20, 8]], [[30, 10]], [[30, 10]], [[35, 11]], [[36, 11]]]


def samples(*rates):
    """Return samples every 10 s, with these numbers of tokens per step between them."""
    counts = np.array([(0, 0), *((1000, 1000 - 1000 / rate) for rate in rates)]).cumsum(axis=0)
    return [10.0 * at for at in range(len(counts))], [count[None] for count in counts]


def test_recovery_is_shown_by_two_windows_after_the_fault():
    """The fault is within the fourth window, and ends within the fifth; the seventh is near the value before."""
    seen = recovery(*samples(4, 4, 4, 2, 3, 3.5, 4, 4, 4), fault_at=31, healed_at=44)
    assert seen == (pytest.approx(4), pytest.approx(2), pytest.approx(4), 26, pytest.approx(1))
    seen = recovery(*samples(4, 4, 4, 2, 2, 3, 3.8, 3.8), fault_at=31, healed_at=44)
    assert (seen.seconds, seen.ratio) == (None, pytest.approx(0.95))
    assert recovery(*samples(4, 4, 4, 2, 2), fault_at=31, healed_at=44) is None


def test_a_process_is_compared_by_mean_memory_and_by_the_least_number_of_threads():
    def sample(time, memory, threads, cpu_s):
        return soak.Sample(time, {"engine": Usage(cpu_s, memory, threads, 10)}, 0)

    first = [sample(0, 100e6, 5, 1.0), sample(10, 100e6, 9, 2.0)]
    last = [sample(50, 101e6, 6, 8.0), sample(60, 103e6, 6, 8.5)]
    compared = soak.compare_process("engine", first, last)
    assert (compared["memory_mb"], compared["growth"]) == ([100, 102], 0.02)
    assert (compared["threads"], compared["cores"]) == ([5, 6], [0.1, 0.05])


def test_a_run_that_is_too_short_to_compare_its_parts_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["soak", "--minutes", "1"])
    with pytest.raises(SystemExit):
        soak.main()
    assert "--minutes must be at least 2" in capsys.readouterr().err
