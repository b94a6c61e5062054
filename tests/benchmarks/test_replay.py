"""The replay benchmark: its figures compared with a slow replay, the order of requests, and invalid input."""

import json
import math
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.replay import main
from benchmarks.support import peers
from benchmarks.support.drafters import OWN_DRAFTERS, own_candidates
from benchmarks.support.replaying import MeasuredDrafter, replay
from benchmarks.support.scores import best_rows, compare, figures
from benchmarks.traces import Trace, copy_edit, load_trace
from ssd.base import CorpusDrafter
from ssd.drafter import SuffixDrafter
from ssd.types import Progress
from tests.drafter_service.commands.advise.logs import traffic_of
from tests.replay import branches

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


def replay_slowly(drafter, trace):
    """Replay one request after the other, and compute the figures by their definitions."""
    steps, tokens, drafted, accepted, probs, agrees = 0, 0, 0, 0, [], []
    has_corpus = isinstance(drafter, CorpusDrafter)
    for index, request in enumerate(trace.requests):
        options = {"session_id": request.session} if isinstance(drafter, SuffixDrafter) else {}
        drafter.start(index, request.prompt, **options)
        left, last, verified = request.output.tolist(), [], 0
        while left:
            if has_corpus:
                drafter.corpus.refresh()
            progress = Progress.of_one(index, np.array(last, np.uint32), verified=verified, max_draft=8)
            draft = drafter.draft(progress)
            paths = branches(draft.tokens.tolist(), draft.parents.tolist())
            right = [path == left[: len(path)] for path in paths]
            longest = max((len(path) for path, is_right in zip(paths, right, strict=True) if is_right), default=0)
            if has_corpus and tokens >= trace.output_tokens / 10:
                probs += [math.prod(path) for path in branches(draft.accept_prob.tolist(), draft.parents.tolist())]
                agrees += right
            last, left, verified = left[: longest + 1], left[longest + 1 :], len(paths)
            steps, drafted, accepted, tokens = steps + 1, drafted + verified, accepted + longest, tokens + len(last)
        drafter.finish(index, np.array(last, np.uint32), verified=verified)
    bins = [[i for i, p in enumerate(probs) if b <= min(p * 10, 9.999) < b + 1] for b in range(10)]
    gaps = sum(abs(sum(probs[i] - agrees[i] for i in members)) for members in bins)
    return {
        "output_tokens": tokens,
        "steps": steps,
        "S": tokens / steps / (1 + COST * drafted / steps),
        "accept_rate": accepted / drafted if drafted else None,
        "ece": gaps / len(probs) if probs else None,
    }


@pytest.mark.parametrize(
    ("drafter", "shape"), [("ssd", "path"), ("ssd", "tree"), ("classic", ""), ("ngram", ""), ("none", "")]
)
def test_figures_equal_those_of_a_slow_replay(trace_path, drafter, shape):
    trace, candidate = load_trace(trace_path), candidate_of(drafter, shape)
    row = figures(replay(candidate, trace), COST)
    slow = replay_slowly(candidate.build(trace.traffic()), trace)
    assert {name: row[name] for name in slow} == pytest.approx(slow, abs=1e-4)
    assert row["output_tokens"] == trace.output_tokens


@pytest.mark.parametrize("drafter", OWN_DRAFTERS)
@pytest.mark.parametrize("concurrency", [1, 4])
def test_every_replay_commits_the_whole_output(trace_path, drafter, concurrency):
    trace = load_trace(trace_path)
    tally = replay(candidate_of(drafter), trace, concurrency)
    assert tally.output_tokens == trace.output_tokens
    assert len(tally.draft_s) == tally.steps
    assert (tally.steps == trace.output_tokens) == (drafter == "none")


def test_a_repeated_replay_has_the_same_outcome(trace_path):
    trace, candidate = load_trace(trace_path), candidate_of("ssd")
    first, second = (replay(candidate, trace, 4) for _ in range(2))
    assert (first.steps, first.drafted, first.path_probs) == (second.steps, second.drafted, second.path_probs)


def test_the_corpus_is_refreshed_before_each_draft(monkeypatch):
    drafter, refreshes, nothing = candidate_of("ssd").build(traffic_of([])), [], np.empty(0, np.uint32)
    measured = MeasuredDrafter(drafter)
    monkeypatch.setattr(drafter.corpus, "refresh", lambda: refreshes.append(1))
    for request in range(11):
        measured.start(request, np.array([1], np.uint32), -1)
        if request:
            measured.draft(Progress.of_one(request, nothing, max_draft=8))
        measured.finish(request, nothing, 0)
    assert len(refreshes) == 10


@pytest.mark.parametrize("drafter", ["ssd", "classic", "rest-like", "arctic"])
def test_a_warm_replay_counts_the_second_time_only(trace_path, drafter):
    if drafter in peers.PEERS and (reason := peers.missing(drafter)):
        pytest.skip(reason)
    trace = load_trace(trace_path)
    candidate = candidate_of(drafter) if drafter in OWN_DRAFTERS else next(peers.peer_candidates(drafter, [8]))
    cold, warm = replay(candidate, trace), replay(candidate, trace, times=2)
    assert warm.output_tokens == cold.output_tokens
    assert warm.steps < 0.75 * cold.steps


def test_copies_of_a_trace_have_different_sessions(trace_path):
    once, twice = (load_trace(trace_path).traffic(times) for times in (1, 2))
    assert np.array_equal(twice.tokens, np.tile(once.tokens, 2))
    assert np.array_equal(np.diff(twice.starts), np.tile(np.diff(once.starts), 2))
    assert np.array_equal(twice.sessions, np.concatenate([once.sessions, once.sessions + 3]))


def test_copies_of_requests_without_a_session_have_none():
    first, second = copy_edit(400).first(8000).requests
    assert Trace("", [replace(first, session=-1), second]).traffic(2).sessions.tolist() == [-1, 1, -1, 3]


def test_groups_and_versions_are_read_where_a_trace_has_them(tmp_path, trace_path):
    assert load_trace(trace_path).traffic().groups.tolist() == [-1] * 12
    assert load_trace(trace_path).traffic().versions.tolist() == [-1] * 12
    groups, versions = np.arange(12) % 2, np.repeat([0, 4, 7], 4)
    np.savez(tmp_path / "rollouts.npz", **np.load(trace_path), group=groups, version=versions)
    once, twice = (load_trace(tmp_path / "rollouts.npz").traffic(times) for times in (1, 2))
    assert np.array_equal(once.groups, groups)
    assert np.array_equal(once.versions, versions)
    assert np.array_equal(twice.groups, np.tile(groups, 2))
    assert np.array_equal(twice.versions, np.concatenate([versions, versions + 8]))
    assert np.array_equal(once.take([3, 8]).versions, [0, 7])


def test_an_epoch_is_the_number_of_lower_versions_of_the_group():
    requests = [([1], [2])] * 6
    traffic = traffic_of(requests, groups=[5, 5, 9, 5, 9, 5], versions=[3, 3, 3, 8, 9, 9])
    assert traffic.epochs().tolist() == [0, 0, 0, 1, 1, 2]
    assert traffic_of(requests, groups=[5] * 6).epochs() is None
    assert traffic_of(requests, versions=[5] * 6).epochs() is None


def test_a_trace_is_cut_at_a_number_of_output_tokens(trace_path):
    trace = load_trace(trace_path).first(100)
    assert [len(request.output) for request in trace.requests] == [66, 34]
    assert load_trace(trace_path).first(10**9).output_tokens == 12 * 66


def test_every_nth_token_of_a_synthetic_copy_differs():
    trace = copy_edit(400)
    assert trace.output_tokens == 40_000
    for request in trace.requests:
        assert np.flatnonzero(request.prompt != request.output).tolist() == list(range(399, 4_000, 400))


def test_missing_and_malformed_files_are_refused(tmp_path, trace_path, capsys):
    arrays = dict(np.load(trace_path))
    np.savez(tmp_path / "short.npz", **(arrays | {"tokens": arrays["tokens"][1:]}))
    (tmp_path / "text.npz").write_text("no trace")
    for name in ("absent.npz", "text.npz", "short.npz"):
        with pytest.raises(SystemExit):
            main(["--trace", str(tmp_path / name), "--drafter", "none"])
        assert f"{name} is not a trace" in capsys.readouterr().err


def refusal(capsys, *arguments):
    """Return the error message of the command for some arguments."""
    with pytest.raises(SystemExit):
        main([str(argument) for argument in arguments])
    return capsys.readouterr().err


def test_truncated_traces_are_refused(tmp_path, trace_path, capsys):
    data = trace_path.read_bytes()
    cut = tmp_path / "cut.npz"
    for size in [*range(0, len(data) - 1, len(data) // 60), len(data) - 1]:
        cut.write_bytes(data[:size])
        assert "cut.npz is not a trace" in refusal(capsys, "--trace", cut, "--drafter", "none")
    for at in range(0, len(data), len(data) // 60):
        cut.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        # Some bits of a file have no meaning.
        with suppress(ValueError):
            load_trace(cut)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": np.full(12 * 96, 0xFFFF_FFFF, np.uint32)},
        {"tokens": np.full(12 * 96, -1)},
        {"tokens": np.full(12 * 96, 1.5)},
        {"tokens": np.zeros((12, 96), np.uint32)},
        {"prompt_len": np.array([126, -66] + [30] * 10)},
        {"prompt_len": np.full(11, 30)},
        {"session": np.zeros(5, np.int32)},
        {"group": np.zeros(5, np.int32)},
        {"version": np.zeros(5, np.int32)},
        {"version": np.full(12, 0.5)},
        {"prompt_len": np.full(12, 96), "output_len": np.zeros(12, np.int32)},
        {name: np.array([], np.int32) for name in ("tokens", "prompt_len", "output_len", "session")},
    ],
    ids=lambda wrong: "-".join(wrong),
)
def test_inconsistent_traces_are_refused(tmp_path, trace_path, capsys, wrong):
    np.savez(tmp_path / "wrong.npz", **(dict(np.load(trace_path)) | wrong))
    assert "wrong.npz is not a trace" in refusal(capsys, "--trace", tmp_path / "wrong.npz", "--drafter", "ssd")


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
    again = Trace("again", [copy, replace(copy, session=1)])
    assert figures(replay(candidate, again), COST)["tokens_per_step"] > 1.5


def test_the_first_half_of_a_trace_is_a_library_for_the_second(trace_path, capsys):
    trace = load_trace(trace_path)
    first, second = trace.halves()
    assert {request.session for request in first.requests} == {0, 1}
    assert {request.session for request in second.requests} == {2}
    arguments = ["--drafter", "ssd", "--k", "8", "--draft-shape", "tree", "--cost", str(COST)]
    main(["--trace", str(trace_path), "--reads", str(trace_path), *arguments])
    with_library, without = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert (with_library["drafter"], without["drafter"]) == ("ssd", "no library, tree")
    assert without["tokens_per_step"] == figures(replay(candidate_of("ssd"), second), COST)["tokens_per_step"]
    assert with_library["tokens_per_step"] > without["tokens_per_step"]
