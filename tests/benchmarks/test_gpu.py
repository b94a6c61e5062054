"""The GPU benchmark: estimates, timelines, served requests, and every part with minimal amounts of work."""

import json
from contextlib import closing
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.bench import SHAPES, TINY, Bench, random_model, step_bytes, step_flops
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.requests import replay_items, serve
from benchmarks.gpu.stepping import FixedDrafter, Interval, binary_tree, by_name, gaps, idle_share, path, record, span
from benchmarks.support import RESULTS
from engine.config import EngineConfig
from engine.drafters.registry import build_drafter
from engine.engine import build_engine
from engine.speculation.draft_tree import straight_length
from ssd.config import DrafterConfig
from ssd.errors import UserError
from ssd.replay import Recording
from tests.replay import recording_of

LLAMA = SHAPES["llama3-8b"]
ON_CPU = ["--device", "cpu", "--dtype", "float32", "--shape", "tiny", "--scale", "tiny", "--time", "10"]


def bench_of(trace, *arguments):
    return Bench(command.build_parser().parse_args([*ON_CPU, "--trace", str(trace), *arguments]))


def figures_of(bench, name):
    """Return the figures of a part; fail for values that no part may report."""
    found = list(PARTS[name].run(bench))
    assert found
    assert all(figure["value"] > 0 and figure["of"] >= 1 for figure in found)
    return found


def test_a_step_loads_weights_and_keys_and_computes_products():
    weights = 32 * (4096 * (32 + 8 + 8 + 32) * 128 + 3 * 4096 * 14_336) + 4096 * 128_256
    # For 32 heads of 128 in 32 layers, a product with each key and each value.
    assert step_flops(LLAMA, 100, 2) == 2 * (2 * weights + 32 * 32 * 100 * (2 * 128 + 2 * 128))
    assert step_bytes(LLAMA, 10, 3, 2) == 2 * weights + 3 * 11 * 128 * 1024


intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda pair: Interval(pair[0], sum(pair))), min_size=1
)


@given(intervals)
def test_gaps_equal_a_scan_over_microseconds(kernels):
    first, last = min(kernel.begin for kernel in kernels), max(kernel.end for kernel in kernels)
    busy = [any(kernel.begin <= now < kernel.end for kernel in kernels) for now in range(first, last)]
    assert sum(gaps(kernels)) == busy.count(False)
    assert span(kernels) == last - first
    assert idle_share(kernels) == busy.count(False) / len(busy)
    starts = [now for now, (before, here) in enumerate(pairwise(busy)) if before and not here]
    assert len(gaps(kernels)) == len(starts)


def test_kernels_are_ranked_by_time():
    kernels = [Interval(0, 1, "norm"), Interval(1, 7, "matrix"), Interval(9, 11, "norm"), Interval(11, 12, "copy")]
    assert by_name(kernels, count=2) == [("matrix", 0.6), ("norm", 0.3)]
    assert idle_share(kernels, min_gap=2) == 2 / 12


def test_shapes_of_drafts():
    assert straight_length(path(5)) == 5
    assert binary_tree(7).tolist() == [-1, 0, 0, 1, 1, 2, 2]


# --- Recorded traffic


@pytest.fixture
def trace(recorded):
    return Recording.load(recorded)


@pytest.fixture
def items(trace):
    return replay_items(trace, 18, 15, SHAPES["tiny"].vocab_size)[0]


def test_a_replay_gives_the_recorded_output_with_every_drafter(items):
    model = random_model(SHAPES["tiny"], torch.float32)
    for drafter in ("none", "ssd"):
        for concurrency in (1, 6):
            drafts = build_drafter(drafter, DrafterConfig(max_draft=33), warn=print)
            with closing(build_engine(model, EngineConfig(max_sequences=concurrency), drafts)) as engine:
                run = serve(engine, items, concurrency)
            assert [output.tolist() for output in run.outputs] == [item.request.recorded.tolist() for item in items]
            # The prompt already contains the phrase.
            assert (run.tokens / run.deliveries > 2) == (drafter != "none") == (run.drafted > 0)
            # Requests of one of the four sessions run one after the other.
            assert max(sequences for _, sequences in run.steps) == min(4, concurrency)


def test_tokens_are_renumbered_only_for_models_with_fewer_of_them(trace, items):
    ids, request = trace.tokens[2:35], items[0].request
    dense = np.concatenate([request.prompt, request.recorded])
    assert dense.max() < 7
    assert (np.equal.outer(ids, ids) == np.equal.outer(dense, dense)).all()
    few = recording_of([(range(9, 29), range(29, 49))])
    [same], is_renumbered = replay_items(few, 18, 15, 4_096)
    assert not is_renumbered
    assert [*same.request.prompt.tolist(), *same.request.recorded.tolist()] == list(range(11, 44))
    many = recording_of([(range(4_000), range(4_000, 5_000))])
    with pytest.raises(UserError, match=r"have 5,000 distinct tokens, the model has 4,096"):
        replay_items(many, 4_000, 1_000, 4_096)


# --- Parts


@pytest.fixture(scope="module")
def bench(recorded):
    return bench_of(recorded)


def test_decode_reports_the_share_of_the_bandwidth(bench):
    assert [figure["unit"] for figure in figures_of(bench, "ceilings")] == ["GB/s", "TFLOP/s"]
    [figure] = figures_of(bench, "decode")
    details = figure["details"]
    reached = 1e9 * details["gb_read"] / (details["step_ms"] / 1e3) / bench.ceilings.bytes_per_s
    assert figure["value"] == pytest.approx(100 * reached, rel=0.5)
    [figure] = figures_of(bench, "streams")
    assert figure["details"]["bound_ms"] <= figure["details"]["estimate_ms"]


def test_verify_verifies_sixteen_tokens_in_every_step(bench):
    [figure] = figures_of(bench, "verify")
    assert (figure["details"]["draft_tokens"], figure["details"]["accepted"]) == (16, 0)
    assert figure["value"] == pytest.approx(figure["details"]["verify_ms"] / figure["details"]["plain_ms"], rel=0.01)


def test_trees_are_compared_with_paths(bench):
    [figure] = figures_of(bench, "trees")
    assert set(figure["details"]) == {"path_ms", "tree_ms"}


def test_replay_accepts_drafts_of_recorded_traffic(bench):
    alone, together = figures_of(bench, "replay")
    for figure in (alone, together):
        assert figure["details"]["renumbered"]
        assert figure["details"]["none_tokens_per_step"] == 1
        assert figure["details"]["ssd_tokens_per_step"] > 1
    assert alone["target"] == 2.2
    assert together["details"]["requests"] == 3


def test_rejected_drafts_are_never_accepted(recorded, monkeypatch):
    calls, draft = [], FixedDrafter.draft
    monkeypatch.setattr(FixedDrafter, "draft", lambda self, progress: calls.append(progress) or draft(self, progress))
    for figure in figures_of(bench_of(recorded, "--in-flight", "1"), "rejected"):
        assert figure["details"]["rejected_tokens_per_step"] == 1
        assert figure["target"] == 0.98
    assert any(progress.max_draft.any() for progress in calls)


def test_drafting_is_timed_embedded_and_remote(bench):
    embedded, remote = figures_of(bench, "drafting")
    assert ["ssd" in embedded["name"], "ssd-remote" in remote["name"]] == [True, True]
    assert embedded["details"]["streams"] == TINY.served[-1] < TINY.streams


@pytest.mark.gpu
@pytest.mark.parametrize("part", PARTS)
def test_parts_run_on_the_device(part, recorded):
    assert list(PARTS[part].run(bench_of(recorded, "--device", "cuda", "--dtype", "bfloat16")))


@pytest.mark.gpu
def test_kernels_are_recorded_without_copies():
    numbers = torch.randn(1 << 20, device="cuda")
    kernels = record(lambda: (numbers.sin(), numbers.clone(), numbers.cpu(), numbers.cos()))
    assert len(kernels) >= 2
    assert not any("Memcpy" in kernel.name for kernel in kernels)
    assert 0 < span(kernels) < 1e6


# --- Processes and results


def test_a_run_writes_its_results_beside_those_of_other_parts(tmp_path, capsys):
    out = tmp_path / "results.json"
    command.main([*ON_CPU, "--commit", "c0ffee", "--part", "ceilings", "--out", str(out)])
    command.main([*ON_CPU, "--commit", "decaf", "--part", "start", "--out", str(out)])
    written = json.loads(out.read_text())
    ended = [(part["name"], part["commit"], part["status"]) for part in written["parts"]]
    assert ended == [("ceilings", "c0ffee", "ok"), ("start", "decaf", "skipped")]
    assert set(written["parts"][0]["figures"][0]) == {"name", "value", "unit", "of", "details"}
    assert "GB/s" in capsys.readouterr().out
    table = command.tables(written)
    assert "Random weights of the shape tiny, float32; steps in flight: decided at run time." in table
    assert "| skipped: graphs are captured on a CUDA device |" in table
    out.write_text(json.dumps(written | {"gpu": "another"}))
    with pytest.raises(UserError, match="another GPU"):
        command.main([*ON_CPU, "--part", "ceilings", "--out", str(out)])


def test_a_part_is_stopped_after_its_time_limit_and_one_that_fails_says_so(recorded):
    ended = command.run_part("decode", [*ON_CPU, "--trace", str(recorded)], 0.5)
    assert (ended["status"], ended["reason"]) == ("out of time", "stopped after 0 s")
    ended = command.run_part("decode", [*ON_CPU, "--device", "cuda", "--attention", "nothing"], 60)
    assert (ended["status"], ended["reason"], ended["figures"]) == ("failed", "exit code 2", [])


def test_the_page_of_the_documentation_is_that_of_the_newest_results():
    newest = max(RESULTS.glob("gpu-*.json"), key=lambda path: path.name)
    assert command.tables(json.loads(newest.read_text())) in command.PAGE.read_text()


def test_without_a_gpu_parts_are_listed(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command.main([])
    said = capsys.readouterr().out
    assert "nothing was measured" in said
    assert all(name in said and part.title in said for name, part in PARTS.items())
    with pytest.raises(SystemExit, match="2"):
        command.main(["--trace", "absent.npz"])
