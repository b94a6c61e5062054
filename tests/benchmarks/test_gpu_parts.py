"""The parts of the GPU benchmark that time steps, on a CPU."""

from dataclasses import replace

import pytest

from benchmarks.gpu import tests
from benchmarks.gpu.bench import TINY, Bench, Setting
from benchmarks.gpu.figures import SkippedError
from benchmarks.gpu.parts import PARTS
from tests.benchmarks.gpu_parts import figures_of


def test_ceilings(bench):
    copying, multiplying = figures_of(bench, "ceilings")
    assert (copying.unit, multiplying.unit) == ("GB/s", "TFLOP/s")


def test_decode_reports_the_share_of_the_bandwidth(bench):
    [figure] = figures_of(bench, "decode")
    details = figure.details
    reached = 1e9 * details["gb_read"] / (details["step_ms"] / 1e3) / (1e9 * details["copy_gb_per_s"])
    assert figure.value == pytest.approx(100 * reached, rel=0.5)
    assert figure.of == TINY.steps * TINY.rounds


@pytest.mark.parametrize("in_flight", [None, 0, 1])
def test_verify_verifies_sixteen_tokens_in_every_step(bench, in_flight):
    [figure] = figures_of(Bench(replace(bench.setting, in_flight=in_flight)), "verify")
    assert (figure.details["draft_tokens"], figure.details["accepted"]) == (16, 0)
    assert figure.value == pytest.approx(figure.details["verify_ms"] / figure.details["plain_ms"], rel=0.01)


def test_trees_are_compared_with_paths(bench):
    [figure] = figures_of(bench, "trees")
    assert set(figure.details) == {"path_ms", "tree_ms"}


def test_streams_are_compared_with_the_estimate(bench):
    [figure] = figures_of(bench, "streams")
    assert figure.details["bound_ms"] <= figure.details["estimate_ms"]


def test_parts_that_need_a_trace_are_skipped_without_one(tmp_path):
    for path in (None, tmp_path / "absent.npz"):
        bench = Bench(Setting("cpu", "float32", "auto", "tiny", TINY, path))
        for part in PARTS:
            if part.name in ("replay", "drafting"):
                with pytest.raises(SkippedError, match="--trace"):
                    list(part.run(bench))


def test_tests_and_all_parts_fit_into_nine_minutes():
    assert tests.LIMIT_S + sum(part.limit_s for part in PARTS) <= 9 * 60


def test_nothing_is_captured_on_a_cpu(bench):
    [start] = [part for part in PARTS if part.name == "start"]
    with pytest.raises(SkippedError, match="CUDA device"):
        list(start.run(bench))
