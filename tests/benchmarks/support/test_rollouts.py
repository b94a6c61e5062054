"""Replays of rollouts: groups and versions, and all requests of a version at once."""

import json
from itertools import groupby

import numpy as np
import pytest

from benchmarks.replay import main
from benchmarks.support.drafters import Candidate
from benchmarks.support.peers.one_by_one import OneByOne, path
from benchmarks.support.replaying import replay
from benchmarks.support.scores import BY_VERSION, LATE_EPOCH
from benchmarks.traces import Request, Trace
from ssd.corpus.rollout import Rollout

PROMPT = [1, 2, 3, 4, 5, 6]


def trace_of(groups, versions, outputs):
    return Trace(
        "rollouts",
        [
            Request(np.array([*PROMPT, *output], np.uint32), len(PROMPT), number, group, version)
            for number, (group, version, output) in enumerate(zip(groups, versions, outputs, strict=True))
        ],
    )


class Recorder(OneByOne):
    """Drafts nothing, and records calls of `start` and `finish`."""

    def __init__(self):
        super().__init__()
        self.begun, self.events = [], []

    def start(self, sequence_id, prompt, *, rollout=None):
        super().start(sequence_id, prompt)
        self.begun.append(rollout)
        self.events.append((sequence_id, "start"))

    def speculate(self, sequence_id, limit):
        return path([])

    def finish(self, sequence_id, tokens):
        super().finish(sequence_id, tokens)
        self.events.append((sequence_id, "finish"))


def recorded(trace, concurrency, **options):
    recorder = Recorder()
    tally = replay(Candidate("recorder", "", lambda _traffic: recorder), trace, concurrency, **options)
    return recorder, tally


def test_no_request_begins_before_all_of_the_previous_version_have_ended():
    versions = [0, 2, 0, 1, 1, 2, 0]
    trace = trace_of([0] * 7, versions, [[7] * length for length in (5, 1, 9, 2, 3, 1, 4)])
    recorder, _ = recorded(trace, BY_VERSION)
    phases = [key for key, _ in groupby((versions[sequence], what) for sequence, what in recorder.events)]
    assert phases == [(version, what) for version in range(3) for what in ("start", "finish")]


def test_drafters_are_given_groups_and_versions_if_the_option_is_set():
    trace = trace_of([4, 4, -1], [-1, 3, 3], [[7], [7], [7]])
    assert recorded(trace, 1)[0].begun == [None] * 3
    assert recorded(trace, 1, groups=True)[0].begun == [Rollout("4", 0), Rollout("4", 3), None]


def test_late_epochs_are_counted_apart():
    versions = [0, 1, 2, 3, 4]
    _, tally = recorded(trace_of([1] * 5, versions, [[7]] * 3 + [[7] * 5, [7] * 6]), BY_VERSION)
    assert (LATE_EPOCH, tally.late_tokens, tally.late_steps) == (3, 11, 11)
    assert recorded(trace_of([1] * 5, [-1] * 5, [[7]] * 5), 1)[1].late_steps == 0


def test_the_command_replays_rollouts(tmp_path, capsys):
    arrays = {"prompt_len": np.full(8, 6), "output_len": np.full(8, 10), "session": np.arange(8)}
    arrays["tokens"] = np.tile(np.array([*PROMPT, *range(20, 30)], np.uint32), 8)
    np.savez(tmp_path / "plain.npz", **arrays)
    np.savez(tmp_path / "rollouts.npz", **arrays, group=np.arange(8) % 2, version=np.arange(8) // 2)
    rollouts = ["--groups", "--drafter", "ssd", "none", "--cost", "0.005", "--concurrency"]
    with pytest.raises(SystemExit):
        main([*rollouts, "version", "--trace", str(tmp_path / "plain.npz")])
    assert "plain has requests without a version" in capsys.readouterr().err
    main([*rollouts, "version,1", "--trace", str(tmp_path / "rollouts.npz")])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert {row["concurrency"] for row in rows} == {"version", 1}
    assert {row["tokens_per_step_late"] for row in rows if row["drafter"] == "none"} == {1.0}
    assert min(row["tokens_per_step_late"] for row in rows if row["drafter"] == "ssd") > 2
