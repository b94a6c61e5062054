"""The parts of the cluster benchmark with logic of their own: router, traffic, link, processes, faults, figures."""

import asyncio
import json
import socket
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import soak
from benchmarks.cluster import faults, run, traffic
from benchmarks.cluster.engines import NOTHING, Totals, read_totals, tokens_per_step
from benchmarks.cluster.learned import Acknowledged, SentTexts, UniqueTexts, observe
from benchmarks.cluster.link import Link
from benchmarks.cluster.meter import Window, recovery
from benchmarks.cluster.observation import Sample, compare_process
from benchmarks.cluster.processes import ManagedProcess, Usage
from benchmarks.cluster.router import Router
from tests.drafter_service.raw import eventually
from tests.redis import free_port
from tests.servers import served

REQUEST = b"POST /v1/completions HTTP/1.1\r\nConnection: keep-alive\r\nContent-Length: 4\r\n\r\nbody"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
TIMEOUT_S = 10


# --- Router


@contextmanager
def engine(answer, received):
    """Yield the port of an engine that sends `answer` and closes the connection; it collects the requests."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                received.append(connection.recv(1 << 16))
                connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    with listener:
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def routed(ports, requests):
    """Return the responses of a router."""

    async def run():
        router = Router(ports)
        server = await asyncio.start_server(router.handle, "127.0.0.1", 0)
        responses = []
        async with server:
            for _ in range(requests):
                reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
                writer.write(REQUEST)
                responses.append(await asyncio.wait_for(reader.read(), TIMEOUT_S))
                writer.close()
        return responses

    return asyncio.run(run())


def test_requests_go_to_the_engines_in_turn():
    first, second = [], []
    with engine(ANSWER, first) as one, engine(ANSWER, second) as two:
        assert routed([one, two], 4) == [ANSWER] * 4
    assert len(first) == len(second) == 2
    # The engine ends the connection with its response.
    assert first[0] == b"POST /v1/completions HTTP/1.1\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbody"


def test_a_request_goes_to_another_engine_if_one_refuses_the_connection():
    received = []
    with engine(ANSWER, received) as port:
        assert routed([free_port(), port], 3) == [ANSWER] * 3
    assert len(received) == 3


def test_a_request_goes_to_another_engine_if_one_dies_before_its_response():
    received, lost = [], []
    with engine(b"", lost) as dying, engine(ANSWER, received) as port:
        assert routed([dying, port], 1) == [ANSWER]
    assert lost == received


def test_a_response_that_has_begun_is_not_repeated():
    received, begun = [], []
    with engine(ANSWER[:20], begun) as dying, engine(ANSWER, received) as port:
        assert routed([dying, port], 1) == [ANSWER[:20]]
    assert (len(begun), len(received)) == (1, 0)


def test_without_any_engine_the_answer_is_an_error():
    assert routed([free_port(), free_port()], 1)[0].startswith(b"HTTP/1.1 502")


# --- Traffic


def test_requests_are_timed_from_when_they_were_due(monkeypatch):
    monkeypatch.setattr(traffic, "complete", lambda port, prompt: prompt)
    sent = traffic.Traffic(0, rate=1000)
    sent.run(["a", "b", "c"])
    times = sorted(record.due for record in sent.records)
    assert [due - times[0] for due in times] == pytest.approx([0, 0.001, 0.002], abs=1e-7)


def test_an_engine_that_dies_within_its_response_has_no_totals():
    with engine(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nvllm", []) as port:
        assert read_totals(port) is None


def test_traffic_that_hangs_ends_the_run(monkeypatch):
    monkeypatch.setattr(run, "ROUNDS_TIMEOUT_S", 0)
    with pytest.raises(SystemExit, match="0 of 2 rounds"):
        run.wait_for_windows(SimpleNamespace(windows=[]), 2)


# --- Link


@pytest.fixture
def link():
    """Yield a link to a server that sends back what it receives."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        connection, _ = listener.accept()
        while data := connection.recv(1 << 16):
            connection.sendall(data)
        connection.close()

    threading.Thread(target=serve, daemon=True).start()
    link = Link(listener.getsockname()[1])
    link.open()
    yield link
    link.close()
    listener.close()


def test_a_link_that_is_cut_holds_bytes_until_it_is_healed(link):
    with socket.create_connection(("127.0.0.1", link.port), timeout=TIMEOUT_S) as end:
        end.sendall(b"one")
        assert end.recv(100) == b"one"
        link.cut()
        end.sendall(b"two")
        end.settimeout(0.1)
        with pytest.raises(TimeoutError):
            end.recv(100)
        link.heal()
        end.settimeout(TIMEOUT_S)
        assert end.recv(100) == b"two"
    assert link.bytes == 12


def test_connections_made_during_a_cut_are_forwarded_afterwards(link):
    link.cut()
    with socket.create_connection(("127.0.0.1", link.port), timeout=TIMEOUT_S) as end:
        end.sendall(b"one")
        link.heal()
        assert end.recv(100) == b"one"
        end.shutdown(socket.SHUT_WR)
        assert end.recv(100) == b""


def test_a_link_that_is_closed_refuses_connections():
    link = Link(free_port())
    link.open()
    link.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", link.port))


# --- Processes


def is_running(pid):
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_is_killed_with_its_children_and_keeps_its_processor_time(tmp_path):
    child = tmp_path / "child"
    busy = f"import os, time; sum(range(10**7)); open({str(child)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    child.touch()
    process = ManagedProcess(
        "parent", [sys.executable, "-c", parent], tmp_path / "log", lambda: bool(child.read_text())
    )
    process.start()
    process.await_ready()
    pid = int(child.read_text())
    used = process.usage()
    assert used.memory_bytes > 0
    process.kill()
    eventually(lambda: not is_running(pid))
    assert process.usage().cpu_s >= used.cpu_s > 0
    assert process.usage().threads == 0


def test_a_process_that_ends_is_not_ready(tmp_path):
    process = ManagedProcess("broken", [sys.executable, "-c", "1/0"], tmp_path / "log", lambda: False)
    process.start()
    with pytest.raises(SystemExit, match=r"broken did not start; see .*log"):
        process.await_ready()
    assert "ZeroDivisionError" in (tmp_path / "log").read_text()


# --- Learned texts


def test_acknowledged_texts_that_a_sidecar_does_not_draft_are_lost(tmp_path):
    address = f"unix:{tmp_path}/drafter.sock"
    texts = UniqueTexts(0)
    kept, lost, excused = (texts.take() for _ in range(3))
    with served("--listen", address, "--capacity", "300k"):
        node = SimpleNamespace(name="a", address=address)
        assert observe(address, kept)
        sent = SentTexts([node], 1)
        sent.acknowledged += [Acknowledged(text, node, time) for time, text in enumerate((kept, lost, excused))]
        assert [(name, each.time) for name, each in sent.lost(0.5, lambda each: each.time == 2)] == [("a", 1)]
    assert not observe(address, kept)


# --- Faults


def test_what_a_sidecar_acknowledged_just_before_its_kill_is_excused(monkeypatch):
    monkeypatch.setattr(faults, "DOWN_S", 0.2)
    during = []
    sidecar = SimpleNamespace(
        kill=lambda: during.append(time.monotonic()), start=lambda: None, await_ready=lambda: None
    )
    node, other = SimpleNamespace(sidecar=sidecar), SimpleNamespace()
    fault = faults.SidecarKilled()
    fault.run(SimpleNamespace(nodes=[node, other]))
    after = time.monotonic()
    assert fault.excuses(Acknowledged(None, node, during[0]))
    assert not fault.excuses(Acknowledged(None, other, during[0]))
    assert not fault.excuses(Acknowledged(None, node, during[0] - 60))
    assert not fault.excuses(Acknowledged(None, node, after))


@pytest.mark.parametrize(("full", "effect"), [(False, True), (True, False)])
def test_a_full_disk_takes_effect_if_no_snapshot_was_saved(full, effect):
    observed = {"saved_before": True, "saved_while_full": full, "saved_after": True}
    assert faults.DiskFull().took_effect(observed) is effect


@pytest.mark.parametrize(("offsets", "effect"), [([0, 3599, -3601, 0], True), ([0, 0, 0, 0], False)])
def test_a_clock_jump_takes_effect_if_the_sidecar_sees_it(offsets, effect):
    assert faults.ClockJumped().took_effect({"clock_offsets_s": offsets}) is effect


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
    rows = run.targets(document)
    assert {row["name"]: row["value"] for row in rows if not row["met"]} == {
        "outputs that differ from the first one of their prompt": 1,
        "faults without effect": 1,
        "faults without recovery within a minute": 2,
    }
    assert rows[-1]["value"] == 20
    json.dumps(rows, allow_nan=False)


# --- Figures


def test_each_step_gives_one_token_more_than_were_accepted():
    assert tokens_per_step(Totals(tokens=20, accepted=15)) == 4
    assert tokens_per_step(NOTHING) is None


def test_totals_of_an_engine_that_has_started_again_are_counted_from_its_start():
    assert Totals(30, 10).since(Totals(20, 8)) == Totals(10, 2)
    assert Totals(5, 1).since(Totals(20, 8)) == Totals(5, 1)


def windows(*values):
    """Return windows of 10 s with these numbers of tokens per step."""
    return [Window(10.0 * at, 10.0 * (at + 1), (Totals(1000, 1000 - 1000 / value),)) for at, value in enumerate(values)]


def test_recovery_is_shown_by_two_windows_after_the_fault():
    """The fault is within the fourth window, and ends within the fifth; the seventh is near the value before."""
    seen = recovery(windows(4, 4, 4, 2, 3, 3.5, 4, 4, 4), fault_at=31, healed_at=44)
    assert (seen.before, seen.lowest, seen.after, seen.seconds) == (
        pytest.approx(4),
        pytest.approx(2),
        pytest.approx(4),
        26,
    )


def test_no_recovery_is_reported_while_tokens_per_step_are_lower():
    seen = recovery(windows(4, 4, 4, 2, 2, 3, 3.8, 3.8), fault_at=31, healed_at=44)
    assert seen.seconds is None
    assert seen.ratio == pytest.approx(0.95)
    assert recovery(windows(4, 4, 4, 2, 2), fault_at=31, healed_at=44) is None


def sample(time, memory, threads, cpu_s):
    return Sample(time, {"engine": Usage(cpu_s, memory, threads, 10)}, 0)


def test_a_process_is_compared_by_mean_memory_and_by_the_least_number_of_threads():
    first = [sample(0, 100e6, 5, 1.0), sample(10, 100e6, 9, 2.0)]
    last = [sample(50, 101e6, 6, 8.0), sample(60, 103e6, 6, 8.5)]
    compared = compare_process("engine", first, last)
    assert compared["memory_mb"] == [100, 102]
    assert compared["growth"] == 0.02
    assert compared["threads"] == [5, 6]
    assert compared["cores"] == [0.1, 0.05]


def test_a_run_that_is_too_short_to_compare_its_parts_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["soak", "--minutes", "1"])
    with pytest.raises(SystemExit):
        soak.main()
    assert "--minutes must be at least 2" in capsys.readouterr().err
