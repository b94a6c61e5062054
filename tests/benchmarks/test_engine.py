import json
import os
from contextlib import closing

import numpy as np
import pytest
import torch

from benchmarks.engine import main
from benchmarks.support.engine_comparison import Comparison
from benchmarks.support.engine_rows import rows_of
from benchmarks.support.requests import Limits, replay_items
from benchmarks.support.serving import Clock, Run, serve
from benchmarks.support.shapes import SHAPES, random_model
from benchmarks.support.transformers_peer import TransformersPeer, same_model
from benchmarks.traces import Request, Trace
from engine.config import EngineConfig
from engine.drafters.registry import build_drafter
from engine.engine import build_engine
from engine.models.loader import checkpoint_views
from engine.models.shipped import SHIPPED_MODEL
from engine.scheduling.times import StageTimes
from ssd.config import DrafterConfig
from ssd.errors import UserError

TINY = SHAPES["tiny"]
SMALL = ("--shape", "tiny", "--requests", "3", "--max-tokens", "6", "--prompt-tokens", "20", "--rounds", "1")


@pytest.fixture
def trace():
    """Return a trace of 6 requests of 2 sessions that repeat one phrase, with token ids above small vocabularies."""
    phrase = np.random.default_rng(0).integers(150_000, 200_000, 7).astype(np.uint32)
    return Trace("phrase", [Request(np.tile(phrase, 6), 20, number % 2) for number in range(6)])


@pytest.fixture
def items(trace):
    return replay_items(trace, 6, Limits(prompt_tokens=18, max_tokens=15), TINY)


def document(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_every_drafter_gives_the_outputs_of_plain_decoding_and_so_does_transformers(capsys):
    main([*SMALL, "--drafter", "none,ngram,ssd", "--concurrency", "1,2", "--ignore-eos"])
    result = document(capsys)
    rows = {(row["drafter"], row["concurrency"]): row for row in result["results"]}
    assert set(rows) == {("transformers", 1), ("transformers-pld", 1)} | {
        (drafter, concurrency) for drafter in ("none", "ngram", "ssd") for concurrency in (1, 2)
    }
    assert all(row["identical_to_none"] is True for row in rows.values())
    assert rows["none", 2]["speedup_vs_none"] == rows["none", 2]["tokens_per_step"] == 1
    assert sum(rows["ssd", 2]["share"].values()) == pytest.approx(1, abs=0.01)
    assert any("random weights" in note for note in result["notes"])


def test_outputs_of_a_schema_are_compared_with_plain_decoding(capsys):
    structured = ["--structured", "--requests", "2", "--max-tokens", "24", "--prompt-tokens", "20", "--rounds", "1"]
    main([*structured, "--drafter", "none,forced,ssd", "--concurrency", "2"])
    plain, forced, ssd = document(capsys)["results"]
    assert (plain["tokens_per_step"], plain["drafted_per_step"]) == (1, 0)
    assert min(forced["tokens_per_step"], ssd["tokens_per_step"]) > 1.5
    assert forced["identical_to_none"] is ssd["identical_to_none"] is True
    assert forced["cpu_ms_per_token"] > 0


def test_a_sidecar_drafts_for_the_named_model(capsys, monkeypatch):
    named = []

    def build(name, config, target, **sidecar):
        named.append((name, target.folder))
        return build_drafter(name, config, target, **sidecar)

    monkeypatch.setattr("benchmarks.support.engine_comparison.build_drafter", build)
    monkeypatch.setattr("engine.drafters.kinds.REMOTE_DEADLINE_S", 10.0)
    main(
        [
            *SMALL[2:],
            "--no-peers",
            "--drafter",
            "none,ssd-remote",
            "--concurrency",
            "2",
            "--max-tokens",
            "40",
        ]
    )
    row = next(row for row in document(capsys)["results"] if row["drafter"] == "ssd-remote")
    assert set(named) == {("none", SHIPPED_MODEL), ("ssd-remote", SHIPPED_MODEL)}
    assert row["identical_to_none"] is True
    assert row["drafted_per_step"] > 0


def test_waiting_threads_do_not_spin_on_a_busy_machine(monkeypatch):
    given = []

    def fail(_):
        assert given == [os.environ]
        raise UserError("stop here")

    monkeypatch.setattr("benchmarks.engine.limit_spinning", given.append)
    monkeypatch.setattr("benchmarks.support.engine_comparison.prepare", fail)
    with pytest.raises(SystemExit):
        main([])


def test_a_replay_gives_the_recorded_output_with_every_drafter(items):
    model = random_model(TINY, torch.float32)
    for drafter in ("none", "ngram", "ssd"):
        for concurrency in (1, 2):
            drafts = build_drafter(drafter, DrafterConfig(max_draft=33), warn=print)
            config = EngineConfig(max_sequences=concurrency)
            with closing(build_engine(model, config, drafts)) as engine:
                run = serve(engine, items, concurrency, lambda: None)
            assert [output.tolist() for output in run.outputs] == [item.request.recorded.tolist() for item in items]
            # The prompt already contains the phrase.
            assert (run.tokens / run.deliveries > 2) == (drafter != "none")


@pytest.mark.parametrize("lookup", [False, True])
def test_transformers_replays_the_recorded_output(items, lookup):
    peer = TransformersPeer(
        same_model(None, random_model(TINY, torch.float32), torch.float32), lookup=lookup, eos_token_ids=[0]
    )
    run = peer.run(items, lambda: None)
    assert [output.tolist() for output in run.outputs] == [item.request.recorded.tolist() for item in items]
    assert (run.tokens / run.deliveries > 2) == lookup


def test_tokens_are_renumbered_only_for_models_with_fewer_of_them(trace, items):
    large = replay_items(trace, 6, Limits(prompt_tokens=18, max_tokens=15), SHAPES["llama3-8b"])
    assert max(int(item.request.prompt.max()) for item in items + large) < 7
    ids = np.concatenate([trace.requests[0].tokens[2:20], trace.requests[0].tokens[20:35]])
    dense = np.concatenate([items[0].request.prompt, items[0].request.recorded])
    assert (np.equal.outer(ids, ids) == np.equal.outer(dense, dense)).all()
    few = Trace("few", [Request(np.arange(40, dtype=np.uint32) + 9, 20, 0)])
    [same] = replay_items(few, 1, Limits(18, 15), TINY)
    assert same.request.prompt.tolist() == list(range(11, 29))
    assert same.request.recorded.tolist() == list(range(29, 44))
    many = Trace("many", [Request(np.arange(5_000, dtype=np.uint32), 4_000, 0)])
    with pytest.raises(UserError, match=r"have 5,000 distinct tokens, the model has 4,096"):
        replay_items(many, 1, Limits(4_000, 1_000), TINY)


def test_requests_of_a_session_run_one_after_the_other(items):
    model, drafter = random_model(TINY, torch.float32), build_drafter("none", DrafterConfig(), warn=print)
    run = serve(build_engine(model, EngineConfig(max_sequences=6), drafter), items, 6, lambda: None)
    assert max(sequences for _, sequences in run.steps) == 2


def run_of(seconds, tokens, *, overhead=0.0, drafted=None):
    """Return a run of one request with two tokens per step."""
    times = StageTimes(schedule=overhead, forward=1.0)
    clock = Clock(0.0, ttft=0.5, gaps=[seconds / tokens] * (tokens - 2), deliveries=tokens // 2)
    steps = [] if drafted is None else [(times, 1)] * (tokens // 2) + [(StageTimes(schedule=9.0), 0)]
    return Run(seconds, [np.arange(tokens)], [clock], 3 << 20, drafted, steps)


def test_figures_are_medians_and_ratios_are_taken_within_a_round():
    plain = [run_of(2.0, 8), run_of(4.0, 8), run_of(8.0, 8)]
    quick = [run_of(seconds, 8, overhead=0.25, drafted=6) for seconds in (1.0, 1.0, 8.0)]
    rounds = {("none", 1): plain, ("ssd", 1): quick, ("ssd", 4): quick}
    _, row, lone = rows_of(rounds, replayed=False)
    assert {name: row[name] for name in ("tokens_per_s", "speedup_vs_none", "itl_ms_p50", "ttft_ms_p50")} == {
        "tokens_per_s": 8.0,
        "speedup_vs_none": 2.0,  # of 2, 4 and 1
        "itl_ms_p50": 125.0,
        "ttft_ms_p50": 500.0,
    }
    assert (row["tokens_per_step"], row["drafted_per_step"], row["peak_mib"]) == (2.0, 1.5, 3)
    # A step without output counts in the shares, but is not a decoding step.
    assert row["overhead_ms_per_step"] == 250.0
    assert row["share"]["schedule"] == pytest.approx(10 / 14, abs=1e-4)
    assert row["identical_to_none"] is True
    assert (lone["speedup_vs_none"], lone["identical_to_none"]) == (None, None)
    assert rows_of(rounds, replayed=True)[1]["identical_to_none"] is None
    quick[1].outputs[0] = np.zeros(8)
    assert rows_of(rounds, replayed=False)[1]["identical_to_none"] is False


def test_tokens_of_one_step_share_its_time(monkeypatch):
    now = iter([1.0, 1.6])
    monkeypatch.setattr("benchmarks.support.serving.perf_counter", lambda: next(now))
    clock = Clock(began=0.25)
    clock.record(2)
    clock.record(3)
    assert (clock.ttft, clock.deliveries) == (0.75, 2)
    assert clock.gaps == pytest.approx([0.2] * 3)


def test_shapes_equal_transformers_with_the_same_weights():
    model = random_model(TINY, torch.float32)
    other = same_model(None, model, torch.float32)
    views = checkpoint_views(model)
    assert all(torch.equal(tensor, views[name]) for name, tensor in other.state_dict().items() if name in views)


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as error:
        main([*SMALL, "--no-peers", *arguments])
    assert error.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_invalid_options_are_refused(capsys, tmp_path):
    absent = refusal(capsys, "--replay", str(tmp_path / "absent.npz"))
    assert "absent.npz is not a trace" in absent
    assert absent.endswith("without --replay, the prompts of the shipped model are run")
    assert "lower --prompt-tokens or --max-tokens" in refusal(capsys, "--max-tokens", "2040")
    assert "unknown drafter 'guess'; give none, " in refusal(capsys, "--drafter", "none,guess")
    assert "need as many prompts" in refusal(capsys, "--requests", "201", "--no-repeats")


def test_missing_transformers_is_reported(capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.support.engine_comparison.is_installed", lambda: False)
    main([*SMALL, "--drafter", "none", "--concurrency", "2"])
    result = document(capsys)
    assert [row["drafter"] for row in result["results"]] == ["none"]
    assert any(note.startswith("skipped transformers") for note in result["notes"])


def test_rounds_go_forwards_and_backwards(capsys, monkeypatch):
    order, run = [], Comparison.run
    monkeypatch.setattr(Comparison, "run", lambda self, who, *a, **k: order.append(who[0]) or run(self, who, *a, **k))
    main([*SMALL, "--no-peers", "--drafter", "none,ngram", "--concurrency", "1", "--rounds", "2"])
    warm_up = ["none", "ngram"]
    assert order == [*warm_up, "none", "ngram", "ngram", "none"]
