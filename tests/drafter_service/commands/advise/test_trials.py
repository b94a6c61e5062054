"""Trials have the same results in this process and in others."""

import itertools
import signal
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from drafter_service.commands.advise import trials
from drafter_service.commands.advise.trials import TracedDrafter, Trial, run_trials
from ssd.budget.roofline import roofline
from ssd.errors import UserError
from tests.drafter_service.commands.advise.logs import repeated_requests, traffic_of
from tests.drafter_service.raw import eventually

PROFILE = roofline("h100", "8b")
TRIALS = [Trial("ssd", "path", 8, 2, 20_000, is_whole=True), Trial("ngram", "path", 8, 2, 20_000)]


def test_processes_have_the_results_of_one(monkeypatch):
    traffic = traffic_of(repeated_requests())
    inline = run_trials(traffic, BytesIO(), PROFILE, TRIALS, lambda _: None)
    monkeypatch.setattr(trials, "INLINE_TOKENS", 0)
    monkeypatch.setattr(trials, "usable_processors", lambda: {0, 1})
    with TemporaryFile() as file:
        file.write(traffic.tokens.tobytes())
        file.flush()
        spawned = run_trials(traffic, file, PROFILE, TRIALS, lambda _: None)
    for one, other in zip(inline, spawned, strict=True):
        assert one.trial == other.trial
        assert one.origins == other.origins
        assert one.replay.steps.tolist() == other.replay.steps.tolist()
        assert one.replay.order.tolist() == other.replay.order.tolist()


def test_a_process_that_the_system_ends_is_said(monkeypatch):
    traffic = traffic_of(repeated_requests())
    monkeypatch.setattr(trials, "INLINE_TOKENS", 0)
    monkeypatch.setattr(trials, "usable_processors", lambda: {0, 1})
    monkeypatch.setattr(trials, "_run", end_this_process)
    with TemporaryFile() as file:
        file.write(traffic.tokens.tobytes())
        file.flush()
        with pytest.raises(UserError, match="the system ended a replay"):
            run_trials(traffic, file, PROFILE, TRIALS, lambda _: None)


def end_this_process(*_):
    import os

    os._exit(1)


KILLED = """
import multiprocessing, os, signal, sys
from tempfile import TemporaryFile
from drafter_service.commands.advise import trials
from tests.drafter_service.commands.advise.logs import repeated_requests, traffic_of
from tests.drafter_service.commands.advise.test_trials import PROFILE, TRIALS

if __name__ == "__main__":
    trials.usable_processors = lambda: {0, 1}
    trials.INLINE_TOKENS = trials.REPORTED_TOKENS = 0
    traffic = traffic_of(repeated_requests())

    def end(_):
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    with TemporaryFile() as file:
        file.write(traffic.tokens.tobytes())
        file.flush()
        trials.run_trials(traffic, file, PROFILE, TRIALS[1:] * 64, end)
"""


def test_processes_end_with_their_parent(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    ended = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, timeout=120, cwd=Path.cwd())
    assert ended.returncode == -signal.SIGTERM
    children = [int(pid) for pid in ended.stdout.split()]
    assert len(children) == 2
    eventually(lambda: not any(is_running(child) for child in children))


def is_running(pid):
    """Return whether a process runs; one that ended may wait for whoever inherited it to notice."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_drafts_are_timed_by_the_processor_time_of_the_thread(monkeypatch):
    assert TracedDrafter.clock is time.thread_time
    monkeypatch.setattr(TracedDrafter, "clock", staticmethod(itertools.count().__next__))
    [outcome] = run_trials(traffic_of(repeated_requests()), BytesIO(), PROFILE, TRIALS[:1], lambda _: None)
    assert outcome.draft_ms == 1000
