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
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.commands.advise import trials
from drafter_service.commands.advise.trials import (
    PAGE_SIZE,
    Trial,
    curve_at,
    host_ms,
    run_trials,
    uncached_prompt_tokens,
)
from ssd.budget.curve import StepCurve
from ssd.budget.roofline import roofline
from ssd.errors import UserError
from tests.drafter_service.commands.advise.logs import random_requests, repeated_requests, write_log
from tests.drafter_service.raw import eventually
from tests.replay import recording_of

PROFILE = roofline("h100", "8b")
TRIALS = [Trial("ssd", "path", 8, 2, 20_000, is_whole=True), Trial("ngram", "path", 8, 2, 20_000)]


def test_processes_have_the_results_of_one(monkeypatch):
    recording = recording_of(repeated_requests())
    inline = run_trials(recording, BytesIO(), PROFILE, TRIALS, lambda _: None)
    monkeypatch.setattr(trials, "INLINE_TOKENS", 0)
    monkeypatch.setattr(trials, "usable_processors", lambda: {0, 1})
    with TemporaryFile() as file:
        file.write(recording.tokens.tobytes())
        file.flush()
        spawned = run_trials(recording, file, PROFILE, TRIALS, lambda _: None)
    for one, other in zip(inline, spawned, strict=True):
        assert one.trial == other.trial
        assert one.origins == other.origins
        assert one.counts.steps.tolist() == other.counts.steps.tolist()
        assert one.counts.order.tolist() == other.counts.order.tolist()


def test_a_process_that_the_system_ends_is_said(monkeypatch):
    recording = recording_of(repeated_requests())
    monkeypatch.setattr(trials, "INLINE_TOKENS", 0)
    monkeypatch.setattr(trials, "usable_processors", lambda: {0, 1})
    monkeypatch.setattr(trials, "_run", end_this_process)
    with TemporaryFile() as file:
        file.write(recording.tokens.tobytes())
        file.flush()
        with pytest.raises(UserError, match="the system ended a replay"):
            run_trials(recording, file, PROFILE, TRIALS, lambda _: None)


def end_this_process(*_):
    import os

    os._exit(1)


@pytest.mark.parametrize("gpu", ["h100", "l4"])
@pytest.mark.parametrize("concurrency", [1, 4, 64])
def test_no_speedup_exceeds_its_tokens_per_step(gpu, concurrency):
    """A long output that repeats itself runs alone at the end, where its steps must not count as an empty engine's."""
    requests = [*random_requests(40, 20), ([1, 2], [*range(100, 150)] * 40)]
    trial = Trial("ssd", "path", 16, concurrency, 20_000)
    [outcome] = run_trials(recording_of(requests), BytesIO(), roofline(gpu, "8b"), [trial], lambda _: None)
    assert 1 < outcome.speedup < outcome.counts.tokens_per_step


def test_a_step_with_drafts_includes_the_wait_for_the_host(monkeypatch):
    def speedup():
        return run_trials(recording_of(repeated_requests()), BytesIO(), PROFILE, TRIALS[:1], lambda _: None)[0].speedup

    waiting = speedup()
    monkeypatch.setattr(trials, "host_ms", lambda _: 0.0)
    assert speedup() > 1.1 * waiting


def test_a_partly_occupied_step_counts_as_its_share_of_a_full_one():
    full, shared = StepCurve.from_profile(PROFILE), curve_at(PROFILE, 64)
    for sequences in (1, 16, 64):
        expected = sequences / 64 * (full.seconds(4 * 64, 64) + host_ms(64) / 1e3)
        assert shared.seconds(4 * sequences, sequences) == pytest.approx(expected)


KILLED = """
import multiprocessing, os, signal, sys
from tempfile import TemporaryFile
from drafter_service.commands.advise import trials
from tests.drafter_service.commands.advise.logs import repeated_requests
from tests.drafter_service.commands.advise.test_trials import PROFILE, TRIALS
from tests.replay import recording_of

if __name__ == "__main__":
    trials.usable_processors = lambda: {0, 1}
    trials.INLINE_TOKENS = 0
    recording = recording_of(repeated_requests())

    def end(_):
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    with TemporaryFile() as file:
        file.write(recording.tokens.tobytes())
        file.flush()
        trials.run_trials(recording, file, PROFILE, TRIALS[1:] * 64, end)
"""


def test_processes_end_with_their_parent(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    ended = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, timeout=120, cwd=Path.cwd())
    assert ended.returncode == -signal.SIGTERM
    children = [int(pid) for pid in ended.stdout.split()]
    assert len(children) == 2
    eventually(lambda: not any(is_running(child) for child in children))


TERMINATED = """
import os, signal, sys
from drafter_service.commands.advise import trials
from drafter_service.commands.main import cli

if __name__ == "__main__":
    trials.usable_processors = lambda: {0, 1}
    trials.INLINE_TOKENS = 0
    run_trials = trials.run_trials

    def run(*arguments):
        return run_trials(*arguments[:-1], lambda _: os.kill(os.getpid(), signal.SIGTERM))

    trials.run_trials = run
    cli(["advise", "--from", sys.argv[1], "--quiet"])
"""


def test_sigterm_ends_the_command_as_an_interruption_does(tmp_path):
    script, log = tmp_path / "terminated.py", write_log(tmp_path / "log.jsonl", repeated_requests())
    script.write_text(TERMINATED)
    ended = subprocess.run([sys.executable, script, log], capture_output=True, text=True, timeout=120, cwd=Path.cwd())
    assert ended.returncode == 2
    assert ended.stderr.endswith("error: interrupted; nothing was written\n")
    assert "leaked" not in ended.stderr


def is_running(pid):
    """Return whether a process runs; one that ended may wait for whoever inherited it to notice."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_drafts_are_timed_by_the_processor_time_of_the_thread(monkeypatch):
    monkeypatch.setattr(time, "thread_time", itertools.count().__next__)
    [outcome] = run_trials(recording_of(repeated_requests()), BytesIO(), PROFILE, TRIALS[:1], lambda _: None)
    assert outcome.speedup < 0.1, "each draft takes a second"


@st.composite
def texts(draw):
    """Return token ids in pages of one token, so that texts share pages often, and a part of a page."""
    pages = draw(st.lists(st.integers(0, 1), max_size=4))
    return [token for token in pages for _ in range(PAGE_SIZE)] + [7] * draw(st.integers(0, 3))


def slow_uncached(requests):
    missing = 0
    for number, (prompt, output) in enumerate(requests):
        own = prompt + output
        shared = 0
        for earlier in (a + b for a, b in requests[:number]):
            same = next((at for at, (x, y) in enumerate(zip(own, earlier, strict=False)) if x != y), None)
            same = min(len(own), len(earlier)) if same is None else same
            shared = max(shared, same // PAGE_SIZE * PAGE_SIZE)
        missing += max(0, len(prompt) - shared)
    return missing


@given(st.lists(st.tuples(texts(), texts()), max_size=6), st.booleans())
def test_uncached_prompt_tokens_equal_the_slow_twin(requests, has_times):
    columns = {"began_s": range(len(requests), 0, -1)} if has_times else {}
    in_order = requests[::-1] if has_times else requests
    assert uncached_prompt_tokens(recording_of(requests, **columns)) == slow_uncached(in_order)
