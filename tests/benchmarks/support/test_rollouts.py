"""Replays of rollouts: the drafters that use groups and versions, and replays by version."""

import json
from itertools import groupby

import numpy as np
import pytest

from benchmarks.replay import main
from benchmarks.support.drafters import Candidate
from benchmarks.support.peers import ROLLOUT_PEERS, missing, peer_candidates
from benchmarks.support.peers.rollouts import Das, PreviousAnswer, SpecRl
from benchmarks.support.peers.text_drafter import TextDrafter, path
from benchmarks.support.replaying import LATE_EPOCH, replay
from benchmarks.support.scores import BY_VERSION
from ssd.replay import RecordedRequest, Recording

needs_arctic = pytest.mark.skipif(bool(missing("das")), reason="arctic_inference is not installed")
PROMPT = [1, 2, 3, 4, 5, 6]


def begin(drafter, sequence, answer=(), prompt=PROMPT, **origin):
    """Begin a sequence, and commit the beginning of its answer."""
    drafter.start(sequence, np.array(prompt, np.uint32), **origin)
    drafter.commit(sequence, np.array(answer, np.uint32))


def answered(drafter, sequence, answer, **origin):
    """Begin and end a sequence."""
    begin(drafter, sequence, answer, **origin)
    drafter.end(sequence)


def drafted(drafter, sequence, limit=8):
    return drafter.speculate(sequence, limit).token_ids


def trace_of(groups, versions, outputs):
    prompt = np.array(PROMPT, np.uint32)
    return Recording.of(
        RecordedRequest(prompt, np.array(output, np.uint32), number, group, version)
        for number, (group, version, output) in enumerate(zip(groups, versions, outputs, strict=True))
    )


@needs_arctic
@pytest.mark.parametrize(("window", "expected"), [(1, []), (2, [22, 23, 24]), (None, [22, 23, 24])])
def test_das_keeps_the_last_versions_of_each_problem(window, expected):
    drafter = Das(window, 4.0, 0.1, is_tree=False)
    answered(drafter, 0, [20, 21, 22, 23, 24], group="a", version=0)
    answered(drafter, 1, [30, 31, 32, 33, 34], group="a", version=5)
    answered(drafter, 2, [20, 21, 42], group="b", version=6)
    begin(drafter, 3, [20, 21], group="a", version=7)
    assert drafted(drafter, 3) == expected
    begin(drafter, 4, [30, 31], group="a", version=7)
    assert drafted(drafter, 4) == [32, 33, 34]


@needs_arctic
def test_das_drafts_the_most_frequent_continuation_while_it_is_probable():
    drafter = Das(1, 4.0, 0.5, is_tree=False)
    for sequence, answer in enumerate(([20, 21, 22, 23], [20, 21, 22, 24], [20, 21, 25])):
        answered(drafter, sequence, answer, group="a", version=0)
    begin(drafter, 3, [20, 21], group="a", version=1)
    assert drafted(drafter, 3) == [22]


@needs_arctic
def test_specrl_drafts_from_the_previous_version_after_at_least_four_matching_tokens():
    drafter = SpecRl()
    answered(drafter, 0, [10, 11, 12, 13], group="a", version=0)
    answered(drafter, 1, [20, 21, 22, 23, 24, 25, 26, 27], group="a", version=2)
    answered(drafter, 2, [30, 31, 32, 33], group="a", version=3)
    # The end of the prompt precedes the answers.
    begin(drafter, 3, group="a", version=3)
    assert drafted(drafter, 3) == [20, 21]
    begin(drafter, 4, [9, 21, 22, 23], group="a", version=3)
    assert drafted(drafter, 4) == []
    begin(drafter, 5, [9, 20, 21, 22, 23], group="a", version=3)
    assert drafted(drafter, 5, 2) == [24, 25]


@needs_arctic
def test_specrl_doubles_the_length_of_drafts_that_are_accepted_and_else_halves_it():
    drafter, answer = SpecRl(), [*range(10, 90)]
    answered(drafter, 0, answer, group="a", version=0)
    begin(drafter, 1, group="a", version=1)
    lengths, done = [], 0
    for count in (3, 5, 9, 17, 17, 2, 1, 1, 1):
        lengths.append(len(drafted(drafter, 1, 99)))
        drafter.commit(1, np.array(answer[done : done + count], np.uint32))
        done += count
    assert lengths == [2, 4, 8, 16, 16, 16, 8, 4, 2]


def test_the_previous_answer_is_followed_and_found_again_after_a_mismatch():
    drafter = PreviousAnswer(2)
    answered(drafter, 0, [20, 21, 22, 23, 20, 21, 24], group="a", version=0)
    answered(drafter, 1, [70, 71], group="a", version=0)
    answered(drafter, 2, [80, 81, 82], group="b", version=0)
    begin(drafter, 3, group="a", version=1)
    assert drafted(drafter, 3, 3) == [20, 21, 22]
    drafter.commit(3, np.array([20, 21], np.uint32))
    assert drafted(drafter, 3) == [22, 23, 20, 21, 24]
    drafter.commit(3, np.array([9], np.uint32))
    assert drafted(drafter, 3) == []
    drafter.commit(3, np.array([20, 21], np.uint32))
    assert drafted(drafter, 3) == [24]
    drafter.commit(3, np.array([22, 23], np.uint32))
    assert drafted(drafter, 3) == [20, 21, 24]


def test_the_previous_answer_is_of_the_same_sample_or_else_the_last():
    drafter = PreviousAnswer(2)
    answered(drafter, 0, [20, 21], group="a", version=0)
    answered(drafter, 1, [30, 31], group="a", version=0)
    for sequence, expected in ((2, [20, 21]), (3, [30, 31]), (4, [30, 31])):
        begin(drafter, sequence, group="a", version=4)
        assert drafted(drafter, sequence) == expected


@pytest.mark.parametrize("peer", ROLLOUT_PEERS)
def test_without_groups_and_versions_earlier_answers_to_the_prompt_are_drafted(peer):
    if reason := missing(peer):
        pytest.skip(reason)
    drafter = next(peer_candidates(peer, [8])).build(None)
    answered(drafter, 0, [20, 21, 22, 23])
    begin(drafter, 1, [20, 21])
    begin(drafter, 2, [20, 21], prompt=[8, *PROMPT])
    assert drafted(drafter, 1) == [22, 23]
    assert drafted(drafter, 2) == []


@pytest.mark.parametrize("peer", ROLLOUT_PEERS)
def test_a_replay_gives_peers_groups_and_versions(peer):
    if reason := missing(peer):
        pytest.skip(reason)
    candidate, answer = next(peer_candidates(peer, [8])), list(range(20, 40))

    def steps(groups, versions):
        return replay(candidate, trace_of(groups, versions, [answer] * 4), groups=True).counts.steps.sum()

    assert steps([0, 1, 2, 3], [0, 1, 2, 3]) == 80
    assert steps([0, 0, 0, 0], [0, 1, 2, 3]) < 60
    if peer != "das":
        assert steps([0, 0, 0, 0], [5, 5, 5, 5]) == 80


class Recorder(TextDrafter):
    """Drafts nothing, and records the calls that begin and end sequences."""

    def __init__(self):
        super().__init__()
        self.begun, self.events = [], []

    def start(self, sequence_id, prompt, *, group=None, version=None):
        super().start(sequence_id, prompt)
        self.begun.append((group, version))
        self.events.append((sequence_id, "start"))

    def speculate(self, sequence_id, limit):
        return path([])

    def end(self, sequence_id):
        super().end(sequence_id)
        self.events.append((sequence_id, "finish"))


def recorded(trace, concurrency, **options):
    recorder = Recorder()
    tally = replay(Candidate("recorder", "", lambda _: recorder), trace, concurrency, **options)
    return recorder, tally


def test_no_request_begins_before_all_of_the_previous_version_have_ended():
    versions = [0, 2, 0, 1, 1, 2, 0]
    trace = trace_of([0] * 7, versions, [[7] * length for length in (5, 1, 9, 2, 3, 1, 4)])
    recorder, _ = recorded(trace, BY_VERSION)
    phases = [key for key, _ in groupby((versions[sequence], what) for sequence, what in recorder.events)]
    assert phases == [(version, what) for version in range(3) for what in ("start", "finish")]


def test_drafters_are_given_groups_and_versions_if_the_option_is_set():
    trace = trace_of([4, -1], [-1, 3], [[7], [7]])
    assert recorded(trace, 1)[0].begun == [(None, None)] * 2
    assert recorded(trace, 1, groups=True)[0].begun == [("4", None), (None, 3)]


def test_late_epochs_are_counted_apart():
    versions = [0, 1, 2, 3, 4]
    _, tally = recorded(trace_of([1] * 5, versions, [[7]] * 3 + [[7] * 5, [7] * 6]), BY_VERSION)
    assert (LATE_EPOCH, tally.is_late.tolist()) == (3, [False] * 3 + [True] * 2)
    assert tally.counts.steps[tally.is_late].sum() == 11
    assert not recorded(trace_of([1] * 5, [-1] * 5, [[7]] * 5), 1)[1].is_late.any()


def test_the_command_replays_rollouts(tmp_path, capsys):
    arrays = {"prompt_len": np.full(8, 6), "output_len": np.full(8, 10), "session": np.arange(8)}
    arrays["tokens"] = np.tile(np.array([*PROMPT, *range(20, 30)], np.uint32), 8)
    np.savez(tmp_path / "plain.npz", **arrays)
    np.savez(tmp_path / "rollouts.npz", **arrays, group=np.arange(8) % 2, version=np.arange(8) // 2)
    rollouts = ["--groups", "--drafter", "previous-answer", "none", "--concurrency"]
    with pytest.raises(SystemExit):
        main([*rollouts, "version", "--trace", str(tmp_path / "plain.npz")])
    assert "plain has requests without a version" in capsys.readouterr().err
    main([*rollouts, "version,1", "--trace", str(tmp_path / "rollouts.npz")])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert {row["concurrency"] for row in rows} == {"version", 1}
    assert {row["tokens_per_step_late"] for row in rows if row["drafter"] == "none"} == {1.0}
    # A whole answer of 10 tokens is drafted in one step, and its last token is an accepted one.
    assert {row["tokens_per_step_late"] for row in rows if row["drafter"] == "previous-answer"} == {10.0}
