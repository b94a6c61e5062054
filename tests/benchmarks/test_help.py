"""Command lines of the benchmarks."""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"
SLOW = {"gpu"}
"""Commands that load kernels or PyTorch first."""
COMMANDS = {path.stem for path in FOLDER.glob("*.py")} | {path.parent.name for path in FOLDER.glob("*/__main__.py")}
BENCHMARKS = sorted(COMMANDS - SLOW - {"__init__"})

SCRIPT = """
import runpy, sys
module, sys.argv[1:] = sys.argv[1], ["--help"]
try:
    runpy.run_module(module, run_name="__main__")
except SystemExit as end:
    assert not end.code
heavy = {"numba", "torch", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_is_printed_without_loading_kernels_or_pytorch():
    processes = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, f"benchmarks.{name}"], stdout=subprocess.PIPE, text=True)
        for name in BENCHMARKS
    ]
    for name, process in zip(BENCHMARKS, processes, strict=True):
        printed, _ = process.communicate(timeout=120)
        assert (name, process.returncode) == (name, 0)
        assert printed.startswith("usage: ")
