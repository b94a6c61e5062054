"""Estimates, timeline figures, result documents and the results page of the GPU benchmark."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu import __main__ as whole
from benchmarks.gpu import processes, tests
from benchmarks.gpu.estimate import (
    Ceilings,
    kv_bytes_per_token,
    matrix_weights,
    overlapped_seconds,
    step_bytes,
    step_flops,
    step_seconds,
)
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.page import BEGIN, END, NOTHING, merged, read_results, tables, update_page
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.shapes import SHAPES, random_model
from benchmarks.gpu.stepping import FixedDrafter, binary_tree, path, recorded_output
from benchmarks.gpu.timeline import Interval, by_name, gaps, idle_share, span
from benchmarks.support.targets import at_least, at_most
from engine.speculation.draft_tree import DraftTree, straight_length
from ssd.errors import UserError

LLAMA = SHAPES["llama3-8b"]


@pytest.mark.parametrize("shape", ["tiny", "llama3-1b"])
def test_matrix_weights_count_the_linear_layers(shape):
    with torch.device("meta"):
        from engine.models.decoder import Decoder

        decoder = Decoder(SHAPES[shape])
    maps = [module for module in decoder.modules() if isinstance(module, torch.nn.Linear)]
    assert matrix_weights(SHAPES[shape]) == sum(linear.weight.numel() for linear in maps)


def test_bytes_of_a_step_of_llama3_8b():
    # 8.03 billion parameters, less an embedding of 128,256 x 4,096, and the norms.
    assert matrix_weights(LLAMA) == 8_030_261_248 - 128_256 * 4096 - 65 * 4096
    assert kv_bytes_per_token(LLAMA, 2) == 128 * 1024
    assert step_bytes(LLAMA, [2048], 1, 2) == 2 * matrix_weights(LLAMA) + 2049 * 128 * 1024
    assert step_bytes(LLAMA, [10, 20], 3, 2) == 2 * matrix_weights(LLAMA) + (30 + 6) * 128 * 1024


def test_operations_are_those_of_products_and_attention():
    # Each of 2 tokens: 2 operations a weight; for 32 heads of 128 in 32 layers, a product with each key and each value.
    assert step_flops(LLAMA, [100], 2) == 2 * (2 * matrix_weights(LLAMA) + 32 * 32 * 100 * (2 * 128 + 2 * 128))


def test_step_time_is_loading_plus_computing():
    ceilings = Ceilings(4e12, 800e12)
    loading = step_bytes(LLAMA, [2048] * 64, 1, 2) / 4e12
    computing = step_flops(LLAMA, [2048] * 64, 1) / 800e12
    assert step_seconds(LLAMA, [2048] * 64, 1, 2, ceilings) == pytest.approx(loading + computing)
    assert overlapped_seconds(LLAMA, [2048] * 64, 1, 2, ceilings) == loading > computing
    assert overlapped_seconds(LLAMA, [0] * 4096, 1, 2, ceilings) == step_flops(LLAMA, [0] * 4096, 1) / 800e12


def test_gaps_are_times_without_kernels():
    kernels = [Interval(20, 30), Interval(0, 10), Interval(5, 12), Interval(29, 29.5), Interval(31, 40)]
    assert gaps(kernels) == [8, 1]
    assert idle_share(kernels) == 9 / 40
    assert idle_share(kernels, min_gap=5) == 8 / 40
    with pytest.raises(ValueError, match="no kernel ran"):
        idle_share([])


intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda pair: Interval(pair[0], sum(pair))), min_size=1
)


@given(intervals)
def test_gaps_equal_a_scan_over_microseconds(kernels):
    first, last = min(kernel.begin for kernel in kernels), max(kernel.end for kernel in kernels)
    busy = [any(kernel.begin <= now < kernel.end for kernel in kernels) for now in range(first, last)]
    assert sum(gaps(kernels)) == busy.count(False)
    assert span(kernels) == last - first
    starts = [now for now, (before, here) in enumerate(pairwise(busy)) if before and not here]
    assert len(gaps(kernels)) == len(starts)


def test_kernels_are_ranked_by_time():
    kernels = [Interval(0, 1, "norm"), Interval(1, 7, "matrix"), Interval(9, 11, "norm"), Interval(11, 12, "copy")]
    assert by_name(kernels, count=2) == [("matrix", 0.6), ("norm", 0.3)]


def test_shapes_of_drafts():
    assert straight_length(path(5)) == 5
    tree = DraftTree(binary_tree(7))
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1, 2, 2]
    assert tree.depths.tolist() == [1, 2, 2, 3, 3, 3, 3]
    assert straight_length(binary_tree(32)) < 32


def test_a_fixed_draft_is_cut_to_max_draft():
    import numpy as np

    from ssd.types import Progress

    counts = np.array([4, 0, 2], np.uint32)
    none = np.zeros(3, np.uint32)
    progress = Progress(np.arange(3, dtype=np.uint64), none[:0], np.zeros(4, np.uint32), none, counts)
    drafts = FixedDrafter(binary_tree(3), 100).draft(progress)
    assert np.diff(drafts.offsets).tolist() == [3, 0, 2]
    assert drafts.parents.tolist() == [-1, 0, 0, -1, 0]
    assert 0 <= drafts.tokens.min() < drafts.tokens.max() < 100
    # The first output token is 0; in a tree, too, positions are counted in the order of its nodes.
    assert (drafts.tokens != recorded_output(np.array([0, 1, 2, 0, 1]), 100)).all()


def test_targets_are_lower_or_upper_bounds():
    assert Figure("speed", 2.2, "x", 3, at_least(2.2)).as_row()["met"] is True
    assert Figure("speed", 2.1, "x", 3, at_least(2.2)).as_row()["met"] is False
    assert Figure("idle", 2.1, "%", 3, at_most(2.0)).as_row()["met"] is False
    assert "met" not in Figure("speed", 2.1, "x", 3).as_row()


def test_random_weights_have_the_dtype_and_are_reproducible():
    one, other = (random_model(SHAPES["tiny"], torch.bfloat16) for _ in range(2))
    assert one.embedding.weight.dtype == torch.bfloat16
    assert torch.equal(one.lm_head.weight, other.lm_head.weight)


def row(name="speed", met=True):
    figure = Figure(name, 3.0 if met else 1.0, "x", 3, at_least(2.0), {"none_ms": 4.5, "kernels": [["a|b", 0.75]]})
    return figure.as_row()


def result(name, figures, **changes):
    base = {"name": name, "title": "a question", "limit_s": 9, "seconds": 1.5, "status": "ok", "reason": ""}
    return {**base, "figures": figures, "commit": "c0ffee", **changes}


def document(*parts, gpu="a GPU"):
    return {
        "date": "2026-01-02T03:04+00:00",
        "gpu": gpu,
        "versions": {"torch": "2.11", "triton": None},
        "commit": "c0ffee",
        "settings": {
            "device": "cuda",
            "dtype": "bfloat16",
            "attention": "auto",
            "in_flight": None,
            "shape": "llama3-8b",
            "scale": "full",
        },
        "parts": list(parts),
    }


def test_update_page_replaces_only_the_figures(tmp_path):
    page = tmp_path / "gpu.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    late = result("late", [row("slow", met=False)], status="out of time", reason="first line\nstopped after 9 s")
    update_page(page, document(result("quick", [row()]), late))
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n2026-01-02")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert "| speed | 3 x | 3 | at least 2 | reached |" in text
    assert "| slow | 1 x | 3 | at least 2 | **not reached** |" in text
    assert "| late | a question | out of time: stopped after 9 s | 1.5 | c0ffee |" in text
    assert "Random weights of the shape llama3-8b, bfloat16; steps in flight: decided at run time" in text
    update_page(page, None)
    assert page.read_text() == f"before\n{BEGIN}\n{NOTHING}{END}\nafter\n"
    page.write_text("no markers")
    with pytest.raises(UserError, match="markers"):
        update_page(page, None)


def test_results_of_several_runs_are_merged(tmp_path):
    first = document(result("a", [row("old")]), result("b", []))
    second = document(result("a", [row("new")]))
    parts = merged([first, second])["parts"]
    assert [one["name"] for one in parts] == ["a", "b"]
    assert parts[0]["figures"][0]["name"] == "new"
    with pytest.raises(UserError, match="differ in their gpu"):
        merged([first, document(gpu="another")])
    file = tmp_path / "results.json"
    file.write_text(json.dumps(first))
    assert read_results(file) == first
    for malformed in ("{", "[]", "{}"):
        file.write_text(malformed)
        with pytest.raises(UserError, match="results"):
            read_results(file)


def test_the_projects_page_has_markers():
    text = whole.PAGE.read_text()
    between = text.partition(BEGIN)[2].partition(END)[0]
    results = sorted(whole.RESULTS.glob("gpu-*.json"))
    if not results:
        assert between == f"\n{NOTHING}"
    assert tables(None) == NOTHING


def test_without_a_gpu_parts_are_listed(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(whole, "run_part", lambda *_: pytest.fail("it ran"))
    whole.main([])
    said = capsys.readouterr().out
    assert "nothing was measured" in said
    assert all(own.name in said and own.title in said for own in PARTS)


def test_a_missing_trace_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        whole.main(["--trace", str(tmp_path / "none.npz")])
    assert "none.npz: there is no such file" in capsys.readouterr().err


def test_without_a_gpu_tests_are_counted_by_file(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = tests.files()
    assert {Path(file).name for file in found} >= {"test_gpu_device.py", "test_flashinfer.py", "test_verify.py"}
    file = tmp_path / "test_some.py"
    file.write_text('"""What it is about.\n\nMore."""\nimport pytest\n')
    with file.open("a") as more:
        more.write(
            "def test_cpu(): pass\n@pytest.mark.gpu\n@pytest.mark.parametrize('n', [1, 2])\ndef test_gpu(n): pass\n"
        )
    assert tests.files(tmp_path) == [str(file)]
    monkeypatch.setattr(tests, "files", lambda: [str(file)])
    assert tests.main([]) == 0
    first, own, whole = capsys.readouterr().out.splitlines()
    assert "no test was run" in first
    assert own.split()[0] == whole.split()[0] == "2"
    assert own.endswith("test_some.py: What it is about.")


PROGRAMS = {
    "good": "def test_it(record_property):\n    record_property('ties', 'only 3')\n",
    "bad": "def test_it():\n    assert False, 'very wrong'\n",
    "slow": "import time\ndef test_it():\n    time.sleep(60)\n",
    "none": "",
}


def test_test_files_run_in_parallel(monkeypatch, capsys, tmp_path):
    files = write_programs(monkeypatch, tmp_path)
    assert tests.run([files["good"], files["bad"], files["none"]], 60) == 1
    said = capsys.readouterr().out
    for words in (
        "test_good.py: ok",
        "ties: only 3",
        "test_bad.py: FAILED",
        "very wrong",
        "test_none.py: ok",
        "2 of 3",
    ):
        assert words in said


def test_test_files_are_stopped_after_the_time_limit(monkeypatch, capsys, tmp_path):
    assert tests.run([write_programs(monkeypatch, tmp_path)["slow"]], 1) == 1
    assert "test_slow.py: OUT OF TIME, 1 s" in capsys.readouterr().out


def write_programs(monkeypatch, folder):
    for name, program in PROGRAMS.items():
        (folder / f"test_{name}.py").write_text(program)
    monkeypatch.setattr(tests, "PYTEST_ARGUMENTS", ("-q", "-p", "no:cacheprovider"))
    return {name: str(folder / f"test_{name}.py") for name in PROGRAMS}


def test_results_of_one_day_get_different_names(tmp_path):
    names = []
    for _ in range(3):
        names.append(whole.new_results_path(tmp_path, "2026-01-02"))
        names[-1].touch()
    assert [name.name for name in names] == [f"gpu-2026-01-02{end}.json" for end in ("", "-b", "-c")]


def test_a_run_writes_its_results(tmp_path, capsys):
    out = tmp_path / "results.json"
    arguments = [
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--shape",
        "tiny",
        "--scale",
        "tiny",
        "--commit",
        "c0ffee",
        "--time",
        "10",
    ]
    whole.main([*arguments, "--part", "ceilings", "--out", str(out)])
    written = json.loads(out.read_text())
    assert written["commit"] == "c0ffee"
    assert [(one["name"], one["status"], one["reason"]) for one in written["parts"]] == [("ceilings", "ok", "")]
    assert set(written["parts"][0]["figures"][0]) == {"name", "value", "unit", "of", "details"}
    assert "GB/s" in capsys.readouterr().out
    assert read_results(out) == written


def test_a_skipped_part_reports_the_reason(capsys):
    processes.main(
        ["--part", "replay", "--device", "cpu", "--shape", "tiny", "--scale", "tiny", "--trace", "absent.npz"]
    )
    figures, reason = processes.read_output(capsys.readouterr().out)
    assert figures == []
    assert "no recorded traffic at absent.npz" in reason


@pytest.mark.parametrize(
    ("program", "status", "reason"),
    [
        ("import time; time.sleep(60)", "out of time", "stopped after 2 s"),
        ("import sys; sys.exit('an illegal access')", "failed", "an illegal access"),
        ("import os; os._exit(3)", "failed", "exit code 3"),
        ("""print('{"skipped": "no trace"}')""", "skipped", "no trace"),
        ("pass", "ok", ""),
    ],
)
def test_reported_figures_are_kept_for_any_end_of_a_part(monkeypatch, program, status, reason):
    line = json.dumps({"figure": row()})
    program = f"print({line!r}, flush=True); print('chatter', flush=True)\n{program}"
    real = processes.subprocess.Popen
    monkeypatch.setattr(
        processes.subprocess, "Popen", lambda command, **options: real([sys.executable, "-c", program], **options)
    )
    ended = processes.run_part(Part("any", "a question", 2, iter), [], 2 if status == "out of time" else 60)
    assert (ended["status"], ended["reason"]) == (status, reason)
    assert ended["figures"] == [row()]
