"""The replay benchmark: its figures compared with a slow replay, the order of requests, and invalid input."""

import json
import math
from itertools import groupby

import numpy as np
import pytest

from benchmarks.replay import main
from benchmarks.support import peers
from benchmarks.support.replaying import (
    BY_VERSION,
    OWN_DRAFTERS,
    Candidate,
    best_rows,
    figures,
    new_drafter,
    own_candidates,
    replay,
)
from ssd.base import CorpusDrafter
from ssd.baselines.none import NoDrafter
from ssd.corpus.rollout import Rollout
from ssd.drafter import SuffixDrafter
from ssd.replay import Recording
from tests.replay import branches, recording_of, replayed

COST = 0.05


@pytest.fixture
def trace_path(tmp_path):
    """Return a trace of 12 requests of 3 sessions, made of few phrases, so that each drafter finds matches."""
    rng = np.random.default_rng(0)
    phrases = rng.integers(0, 100, (6, 8))
    texts = [phrases[rng.integers(0, 6, 12)].ravel() for _ in range(12)]
    path = tmp_path / "phrases.npz"
    np.savez(
        path,
        tokens=np.concatenate(texts).astype(np.uint32),
        prompt_len=np.full(12, 30, np.int32),
        output_len=np.full(12, 66, np.int32),
        session=np.array([0, 0, 0, 1, 2, 1, 2, 1, 0, 2, 1, 0], np.int32),
    )
    return path


def candidate_of(drafter, shape="tree"):
    return next(own_candidates(drafter, [8], [shape], [COST]))


def figures_slowly(drafter, trace):
    """Replay one request after the other, and compute the figures by their definitions."""
    tokens, sizes, accepted, probs, agrees = 0, [], 0, [], []
    has_corpus = isinstance(drafter, CorpusDrafter)
    for index, request in enumerate(trace.requests):
        options = {"session_id": request.session} if isinstance(drafter, SuffixDrafter) else {}
        steps = replayed(drafter, index, request.prompt, request.output, 8, refreshes=has_corpus, **options)
        for draft, left, length in steps:
            parents = draft.parents.tolist()
            if has_corpus and tokens >= trace.output_tokens / 10:
                probs += [math.prod(path) for path in branches(draft.accept_prob.tolist(), parents)]
                agrees += [path == left.tolist()[: len(path)] for path in branches(draft.tokens.tolist(), parents)]
            tokens, accepted = tokens + min(length + 1, len(left)), accepted + length
            sizes.append(len(parents))
    bins = [[i for i, p in enumerate(probs) if b <= min(p * 10, 9.999) < b + 1] for b in range(10)]
    gaps = sum(abs(sum(probs[i] - agrees[i] for i in members)) for members in bins)
    return {
        "output_tokens": tokens,
        "steps": len(sizes),
        "S": tokens / (len(sizes) + COST * sum(sizes)),
        "accept_rate": accepted / sum(sizes) if sum(sizes) else None,
        "ece": gaps / len(probs) if probs else None,
    }


@pytest.mark.parametrize(
    ("drafter", "shape"), [("ssd", "path"), ("ssd", "tree"), ("classic", ""), ("ngram", ""), ("none", "")]
)
def test_figures_equal_those_of_a_slow_replay(trace_path, drafter, shape):
    trace, candidate = Recording.load(trace_path), candidate_of(drafter, shape)
    tally = replay(candidate, trace)
    row = figures(tally, COST)
    slow = figures_slowly(new_drafter(candidate, trace), trace)
    assert {name: row[name] for name in slow} == pytest.approx(slow, abs=1e-4)
    assert row["output_tokens"] == trace.output_tokens
    assert len(tally.draft_s) == row["steps"]


@pytest.mark.parametrize("drafter", ["ssd", "classic", "rest-like", "arctic"])
def test_a_warm_replay_counts_the_second_time_only(trace_path, drafter):
    if drafter in peers.PEERS and (reason := peers.missing(drafter)):
        pytest.skip(reason)
    trace = Recording.load(trace_path)
    candidate = candidate_of(drafter) if drafter in OWN_DRAFTERS else next(peers.peer_candidates(drafter, [8]))
    cold, warm = replay(candidate, trace), replay(candidate, trace, times=2)
    assert warm.output_tokens == cold.output_tokens
    assert warm.counts.steps.sum() < 0.75 * cold.counts.steps.sum()


class Recorder(NoDrafter):
    """Records the calls that begin and end sequences."""

    def __init__(self):
        self.begun, self.events = [], []

    def start(self, sequence_id, prompt, *, session_id=None, rollout=None):
        self.begun.append((session_id, rollout))
        self.events.append((sequence_id, "start"))

    def finish(self, sequence_id, tokens, **_options):
        self.events.append((sequence_id, "finish"))


def recorded(trace, concurrency, **options):
    recorder = Recorder()
    replay(Candidate("recorder", "", lambda _: recorder), trace, concurrency, **options)
    return recorder


def test_no_request_begins_before_all_of_the_previous_version_have_ended():
    versions = [0, 2, 0, 1, 1, 2, 0]
    trace = recording_of([([1], [7] * length) for length in (5, 1, 9, 2, 3, 1, 4)], versions=versions)
    phases = [key for key, _ in groupby((versions[who], what) for who, what in recorded(trace, BY_VERSION).events)]
    assert phases == [(version, what) for version in range(3) for what in ("start", "finish")]


def test_rollouts_are_given_if_wanted_and_another_replay_has_other_sessions_and_versions():
    trace = recording_of([([1], [7])] * 3, sessions=[-1, 0, 1], groups=[4, -1, 5], versions=[-1, 3, 2])
    assert recorded(trace, 1).begun == [(None, None), ("0", None), ("1", None)]
    once = [(None, Rollout("4", 0)), ("0", None), ("1", Rollout("5", 2))]
    again = [(None, Rollout("4", 4)), ("0, replay 1", None), ("1, replay 1", Rollout("5", 6))]
    assert recorded(trace, 1, groups=True, times=2).begun == once + again


def refusal(capsys, *arguments):
    """Return the error message of the command for some arguments."""
    with pytest.raises(SystemExit):
        main([str(argument) for argument in arguments])
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--trace", "absent.npz"), "absent.npz is not a recording"),
        (("--trace", __file__), "test_replay.py is not a recording"),
        ((), "--trace"),
        *((("--cost", cost), "argument --cost: ") for cost in ("0", "nan", "0.1,2")),
        *((("--k", k), "argument --k: ") for k in ("65", "8,0")),
    ],
)
def test_invalid_input_is_refused(capsys, arguments, word):
    assert word in refusal(capsys, "--drafter", "ssd", *arguments)


def test_the_last_line_is_one_json_document(trace_path, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda package: None)
    copy = tmp_path / "copy.json"
    arguments = ["--trace", str(trace_path), "--drafter", *OWN_DRAFTERS, "arctic", "pld", "--cost", "0.005,0.1"]
    main([*arguments, "--k", "64", "--concurrency", "1,4", "--max-output-tokens", "300", "--out", str(copy)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "skipped arctic: arctic_inference is not installed (make peers)"
    assert lines[1].startswith("skipped pld: ")
    document = json.loads(lines[-1])
    assert json.loads(copy.read_text()) == document
    # Two costs and two concurrencies; ssd as path and as tree.
    assert len(document["results"]) == 2 * 2 * (2 + 3)
    for row in document["results"]:
        assert row["output_tokens"] == 300
        expected = row["tokens_per_step"] / (1 + row["cost"] * row["drafted_per_step"])
        assert row["S"] == pytest.approx(expected, abs=1e-3)


def test_the_best_setting_of_others_is_chosen_for_each_trace():
    def row(drafter, setting, trace, s):
        return {"concurrency": 1, "trace": trace, "cost": 0.1, "drafter": drafter, "setting": setting, "S": s}

    rows = [row("ssd", "tree", "a", 4.0), row("ssd", "path", "a", 9.0)]
    rows += [row("arctic", "x", "a", 2.0), row("arctic", "y", "a", 1.0)]
    rows += [row("arctic", "x", "b", 0.5), row("arctic", "y", "b", 1.0)]
    assert [best["setting"] for best in best_rows(rows)] == ["tree", "path", "x", "y"]


@pytest.mark.parametrize("peer", peers.PEERS)
def test_peers_draft_repeated_text(peer):
    if reason := peers.missing(peer):
        pytest.skip(reason)
    # The first copies its prompt, from which some drafters do not draft; the second repeats the first.
    text = np.random.default_rng(0).integers(0, 50_000, 100)
    candidate, again = next(peers.peer_candidates(peer, [16])), recording_of([(text, text)] * 2, sessions=[0, 1])
    assert figures(replay(candidate, again), COST)["tokens_per_step"] > 1.5


def test_the_command_replays_versions(tmp_path, capsys):
    arrays = {"prompt_len": np.full(8, 6), "output_len": np.full(8, 10), "session": np.arange(8)}
    arrays["tokens"] = np.tile(np.array([*range(6), *range(20, 30)], np.uint32), 8)
    np.savez(tmp_path / "plain.npz", **arrays)
    np.savez(tmp_path / "rollouts.npz", **arrays, group=np.arange(8) % 2, version=np.arange(8) // 2)
    arguments = ["--groups", "--drafter", "ssd", "none", "--draft-shape", "path", "--concurrency"]
    assert "without a version" in refusal(capsys, *arguments, "version", "--trace", tmp_path / "plain.npz")
    main([*arguments, "version,1", "--trace", str(tmp_path / "rollouts.npz")])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert {row["concurrency"] for row in rows} == {"version", 1}
    assert all((row["tokens_per_step"] > 2) == (row["drafter"] == "ssd") for row in rows)
