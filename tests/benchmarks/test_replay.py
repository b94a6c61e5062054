"""The replay benchmark: its figures compared with a slow replay, the order of requests, and invalid input."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.replay import copy_edit, halves, main
from benchmarks.support import peers
from benchmarks.support.drafters import OWN_DRAFTERS, own_candidates
from benchmarks.support.replaying import copies_of, epochs_of, replay
from benchmarks.support.scores import best_rows, compare, figures
from ssd.base import CorpusDrafter
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
    slow = figures_slowly(candidate.build(trace), trace)
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


def test_copies_have_different_sessions_and_versions(trace_path):
    once = replace(Recording.load(trace_path), groups=np.arange(12) % 2, versions=np.repeat([0, 4, 7], 4))
    twice = copies_of(once, 2)
    assert np.array_equal(twice.tokens, np.tile(once.tokens, 2))
    assert np.array_equal(np.diff(twice.starts), np.tile(np.diff(once.starts), 2))
    assert np.array_equal(twice.sessions, np.concatenate([once.sessions, once.sessions + 3]))
    assert np.array_equal(twice.groups, np.tile(once.groups, 2))
    assert np.array_equal(twice.versions, np.concatenate([once.versions, once.versions + 8]))


def test_copies_of_requests_without_a_session_have_none():
    assert copies_of(recording_of([([], [1])] * 2, sessions=[-1, 1]), 2).sessions.tolist() == [-1, 1, -1, 3]


def test_an_epoch_is_the_number_of_lower_versions_of_the_group():
    requests = [([1], [2])] * 6
    recording = recording_of(requests, groups=[5, 5, 9, 5, 9, 5], versions=[3, 3, 3, 8, 9, 9])
    assert epochs_of(recording).tolist() == [0, 0, 0, 1, 1, 2]
    assert epochs_of(recording_of(requests, groups=[5] * 6)) is None
    assert epochs_of(recording_of(requests, versions=[5] * 6)) is None


def test_every_nth_token_of_a_synthetic_copy_differs():
    trace = copy_edit(400)
    assert trace.output_tokens == 40_000
    for request in trace.requests:
        assert np.flatnonzero(request.prompt != request.output).tolist() == list(range(399, 4_000, 400))


def refusal(capsys, *arguments):
    """Return the error message of the command for some arguments."""
    with pytest.raises(SystemExit):
        main([str(argument) for argument in arguments])
    return capsys.readouterr().err


def test_missing_and_malformed_files_are_refused(tmp_path, capsys):
    (tmp_path / "text.npz").write_text("no trace")
    for name in ("absent.npz", "text.npz"):
        assert f"{name} is not a recording" in refusal(capsys, "--trace", tmp_path / name, "--drafter", "none")


@pytest.mark.parametrize(
    "setting", [("--cost", "0"), ("--cost", "nan"), ("--cost", "0.1,2"), ("--k", "65"), ("--k", "8,0")]
)
def test_settings_out_of_range_are_refused(trace_path, capsys, setting):
    assert f"argument {setting[0]}: " in refusal(capsys, "--trace", trace_path, "--drafter", "ssd", *setting)


def test_the_largest_draft_size_works(trace_path, capsys):
    main(
        [
            "--trace",
            str(trace_path),
            "--drafter",
            *OWN_DRAFTERS,
            "--k",
            "64",
            "--cost",
            "1",
            "--max-output-tokens",
            "70",
        ]
    )
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["results"]


def test_the_last_line_is_one_json_document(trace_path, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda package: None)
    copy = tmp_path / "copy.json"
    arguments = ["--trace", str(trace_path), "--drafter", *OWN_DRAFTERS, "arctic", "pld", "--cost", "0.005,0.1"]
    main([*arguments, "--concurrency", "1,4", "--max-output-tokens", "300", "--out", str(copy)])
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
    assert len(document["comparison"]) == 2 * 2 * 2 * 3
    for line in document["comparison"]:
        assert line["geometric_mean"] == line["by_trace"]["phrases"]


def test_a_comparison_uses_the_best_setting_of_others_for_each_trace():
    def row(drafter, setting, trace, s):
        return {"concurrency": 1, "trace": trace, "cost": 0.1, "drafter": drafter, "setting": setting, "S": s}

    rows = [row("ssd", "tree k=8", "a", 4.0), row("ssd", "tree k=8", "b", 9.0)]
    rows += [row("arctic", "x", "a", 2.0), row("arctic", "y", "a", 1.0)]
    rows += [row("arctic", "x", "b", 0.5), row("arctic", "y", "b", 1.0)]
    assert [best["setting"] for best in best_rows(rows)] == ["tree k=8", "tree k=8", "x", "y"]
    (line,) = compare(rows)
    assert (line["ssd"], line["against"], line["by_trace"]) == ("tree k=8", "arctic", {"a": 2.0, "b": 9.0})
    assert line["geometric_mean"] == pytest.approx(18**0.5, abs=1e-4)


@pytest.mark.parametrize("peer", peers.PEERS)
def test_peers_draft_repeated_text(peer):
    if reason := peers.missing(peer):
        pytest.skip(reason)
    # The first copies its prompt, from which some drafters do not draft; the second repeats the first.
    copy = copy_edit(400).first(100).requests[0]
    candidate = next(peers.peer_candidates(peer, [16]))
    again = Recording.of([copy, copy._replace(session=1)])
    assert figures(replay(candidate, again), COST)["tokens_per_step"] > 1.5


def test_the_first_half_of_a_trace_is_a_library_for_the_second(trace_path, capsys):
    trace = Recording.load(trace_path)
    first, second = halves(trace)
    assert {*first.sessions.tolist()} == {0, 1}
    assert {*second.sessions.tolist()} == {2}
    arguments = ["--drafter", "ssd", "--k", "8", "--draft-shape", "tree", "--cost", str(COST)]
    main(["--trace", str(trace_path), "--reads", str(trace_path), *arguments])
    with_library, without = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert (with_library["drafter"], without["drafter"]) == ("ssd", "no library, tree")
    assert without["tokens_per_step"] == figures(replay(candidate_of("ssd"), second), COST)["tokens_per_step"]
    assert with_library["tokens_per_step"] > without["tokens_per_step"]
