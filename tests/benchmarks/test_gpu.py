"""The GPU benchmark: estimates, timelines, served requests, and every part with minimal amounts of work."""

import json
import os
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.bench import TINY, Bench, Figure, Setting, SkippedError
from benchmarks.gpu.parts import PARTS, Part, run_part
from benchmarks.gpu.requests import Limits, replay_items, serve
from benchmarks.gpu.shapes import SHAPES, Ceilings, matrix_weights, random_model, step_bytes, step_flops, step_seconds
from benchmarks.gpu.stepping import FixedDrafter, Interval, binary_tree, by_name, gaps, idle_share, path, record, span
from benchmarks.support.targets import at_least
from benchmarks.traces import Request, Trace
from engine.config import EngineConfig
from engine.drafters.registry import build_drafter
from engine.engine import build_engine
from engine.models.decoder import Decoder
from engine.speculation.draft_tree import straight_length
from ssd.config import DrafterConfig
from ssd.errors import UserError

LLAMA = SHAPES["llama3-8b"]
ON_CPU = ["--device", "cpu", "--dtype", "float32", "--shape", "tiny", "--scale", "tiny", "--time", "10"]


def bench_of(device, trace, **changes):
    return Bench(replace(Setting(device, "float32", "auto", "tiny", "tiny", trace), **changes))


def figures_of(bench, name):
    """Return the figures of a part; fail for values that no part may report."""
    [part] = [part for part in PARTS if part.name == name]
    found = list(part.run(bench))
    assert found
    assert all(figure.value > 0 and figure.of >= 1 for figure in found)
    return found


@pytest.mark.parametrize("shape", ["tiny", "llama3-1b", "llama3-8b"])
def test_matrix_weights_count_the_linear_layers(shape):
    with torch.device("meta"):
        maps = [module for module in Decoder(SHAPES[shape]).modules() if isinstance(module, torch.nn.Linear)]
    assert matrix_weights(SHAPES[shape]) == sum(linear.weight.numel() for linear in maps)


def test_a_step_loads_weights_and_keys_and_computes_products():
    # Each of 2 tokens: 2 operations a weight; for 32 heads of 128 in 32 layers, a product with each key and each value.
    assert step_flops(LLAMA, [100], 2) == 2 * (2 * matrix_weights(LLAMA) + 32 * 32 * 100 * (2 * 128 + 2 * 128))
    assert step_bytes(LLAMA, [10, 20], 3, 2) == 2 * matrix_weights(LLAMA) + (30 + 6) * 128 * 1024
    loading, computing = step_bytes(LLAMA, [2048] * 64, 1, 2) / 4e12, step_flops(LLAMA, [2048] * 64, 1) / 800e12
    seconds = step_seconds(LLAMA, [2048] * 64, 1, 2, Ceilings(4e12, 800e12))
    assert seconds == pytest.approx((loading, computing))


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
def trace():
    """Return a trace of 6 requests of 2 sessions that repeat one phrase, with token ids above small vocabularies."""
    phrase = np.random.default_rng(0).integers(150_000, 200_000, 7).astype(np.uint32)
    return Trace("phrase", [Request(np.tile(phrase, 6), 20, number % 2) for number in range(6)])


@pytest.fixture
def items(trace):
    return replay_items(trace, 6, Limits(prompt_tokens=18, max_tokens=15), SHAPES["tiny"])


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
            # Requests of one of the two sessions run one after the other.
            assert max(sequences for _, sequences in run.steps) == min(2, concurrency)


def test_tokens_are_renumbered_only_for_models_with_fewer_of_them(trace, items):
    ids, request = trace.requests[0].tokens[2:35], items[0].request
    dense = np.concatenate([request.prompt, request.recorded])
    assert dense.max() < 7
    assert (np.equal.outer(ids, ids) == np.equal.outer(dense, dense)).all()
    few = Trace("few", [Request(np.arange(40, dtype=np.uint32) + 9, 20, 0)])
    [same] = replay_items(few, 1, Limits(18, 15), SHAPES["tiny"])
    assert [*same.request.prompt.tolist(), *same.request.recorded.tolist()] == list(range(11, 44))
    many = Trace("many", [Request(np.arange(5_000, dtype=np.uint32), 4_000, 0)])
    with pytest.raises(UserError, match=r"have 5,000 distinct tokens, the model has 4,096"):
        replay_items(many, 1, Limits(4_000, 1_000), SHAPES["tiny"])


# --- Parts


def test_decode_reports_the_share_of_the_bandwidth(recorded):
    bench = bench_of("cpu", recorded)
    assert [figure.unit for figure in figures_of(bench, "ceilings")] == ["GB/s", "TFLOP/s"]
    [figure] = figures_of(bench, "decode")
    details = figure.details
    reached = 1e9 * details["gb_read"] / (details["step_ms"] / 1e3) / bench.ceilings.bytes_per_s
    assert figure.value == pytest.approx(100 * reached, rel=0.5)
    [figure] = figures_of(bench, "streams")
    assert figure.details["bound_ms"] <= figure.details["estimate_ms"]


@pytest.mark.parametrize("in_flight", [None, 0, 1])
def test_verify_verifies_sixteen_tokens_in_every_step(recorded, in_flight):
    [figure] = figures_of(bench_of("cpu", recorded, in_flight=in_flight), "verify")
    assert (figure.details["draft_tokens"], figure.details["accepted"]) == (16, 0)
    assert figure.value == pytest.approx(figure.details["verify_ms"] / figure.details["plain_ms"], rel=0.01)


def test_trees_are_compared_with_paths(recorded):
    [figure] = figures_of(bench_of("cpu", recorded), "trees")
    assert set(figure.details) == {"path_ms", "tree_ms"}


def test_replay_accepts_drafts_of_recorded_traffic(recorded):
    alone, together = figures_of(bench_of("cpu", recorded), "replay")
    for figure in (alone, together):
        assert figure.details["renumbered"]
        assert figure.details["none_tokens_per_step"] == 1
        assert figure.details["ssd_tokens_per_step"] > 1
    assert alone.target.value == 2.2
    assert together.details["requests"] == 3


@pytest.mark.parametrize("in_flight", [0, 1])
def test_rejected_drafts_are_never_accepted(recorded, in_flight, monkeypatch):
    calls, draft = [], FixedDrafter.draft
    monkeypatch.setattr(FixedDrafter, "draft", lambda self, progress: calls.append(progress) or draft(self, progress))
    for figure in figures_of(bench_of("cpu", recorded, in_flight=in_flight), "rejected"):
        assert figure.details["rejected_tokens_per_step"] == 1
        assert figure.target.value == 0.98
    assert any(progress.max_draft.any() for progress in calls)


def test_drafting_is_timed_embedded_and_remote(recorded):
    embedded, remote = figures_of(bench_of("cpu", recorded), "drafting")
    assert ["ssd" in embedded.name, "ssd-remote" in remote.name] == [True, True]
    assert embedded.details["streams"] == TINY.served[-1] < TINY.streams


@pytest.mark.gpu
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_parts_run_on_the_device(part, recorded):
    assert list(part.run(bench_of("cuda", recorded, dtype="bfloat16")))


@pytest.mark.gpu
def test_kernels_are_recorded_without_copies():
    numbers = torch.randn(1 << 20, device="cuda")
    kernels = record(lambda: (numbers.sin(), numbers.clone(), numbers.cpu(), numbers.cos()))
    assert len(kernels) >= 2
    assert not any("Memcpy" in kernel.name for kernel in kernels)
    assert 0 < span(kernels) < 1e6


# --- Processes and results


def good(_bench):
    yield Figure("speed", 3.0, "x", 3, at_least(2.0), {"none_ms": 4.5})


def skipped(bench):
    yield from good(bench)
    raise SkippedError("no trace")


def failing(bench):
    yield from good(bench)
    raise ValueError("an illegal access")


def crashing(bench):
    yield from good(bench)
    os._exit(3)


def endless(_bench):
    while True:
        pass
    yield


@pytest.mark.parametrize(
    ("run", "status", "reason"),
    [
        (good, "ok", ""),
        (skipped, "skipped", "no trace"),
        (failing, "failed", "ValueError: an illegal access"),
        (crashing, "failed", "exit code 3"),
    ],
)
def test_reported_figures_are_kept_for_any_end_of_a_part(run, status, reason):
    setting = Setting("cpu", "float32", "auto", "tiny", "tiny", None)
    ended = run_part(Part("any", "a question", 2, run), setting, 120)
    assert (ended["status"], ended["reason"]) == (status, reason)
    [figure] = ended["figures"]
    assert (figure["value"], figure["target"], figure["met"]) == (3.0, 2.0, True)


def test_a_part_is_stopped_after_its_time_limit():
    setting = Setting("cpu", "float32", "auto", "tiny", "tiny", None)
    ended = run_part(Part("any", "a question", 2, endless), setting, 1)
    assert (ended["status"], ended["reason"]) == ("out of time", "stopped after 1 s")


def test_a_run_writes_its_results_and_the_page(tmp_path, capsys):
    out, page = tmp_path / "results.json", tmp_path / "gpu.md"
    command.main([*ON_CPU, "--commit", "c0ffee", "--part", "ceilings", "--part", "start", "--out", str(out)])
    written = json.loads(out.read_text())
    assert [(one["name"], one["status"]) for one in written["parts"]] == [("ceilings", "ok"), ("start", "skipped")]
    assert set(written["parts"][0]["figures"][0]) == {"name", "value", "unit", "of", "details"}
    assert "GB/s" in capsys.readouterr().out
    page.write_text(f"before\n{command.BEGIN}\nold\n{command.END}\nafter\n")
    command.update_page(page, command.merged([written, written]))
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "Random weights of the shape tiny, float32; steps in flight: decided at run time." in lines[2]
    assert sum("| copy bandwidth, read and write |" in line for line in lines) == 1
    assert sum("| skipped: graphs are captured on a CUDA device |" in line for line in lines) == 1
    with pytest.raises(UserError, match="differ in their gpu"):
        command.merged([written, written | {"gpu": "another"}])


def test_the_page_of_the_documentation_is_that_of_the_newest_results():
    newest = max(Path("benchmarks/results").glob("gpu-*.json"), key=lambda path: path.name)
    assert command.tables(json.loads(newest.read_text())) in command.PAGE.read_text()


def test_without_a_gpu_parts_are_listed(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command.main([])
    said = capsys.readouterr().out
    assert "nothing was measured" in said
    assert all(own.name in said and own.title in said for own in PARTS)
    with pytest.raises(SystemExit, match="2"):
        command.main(["--trace", "absent.npz"])
