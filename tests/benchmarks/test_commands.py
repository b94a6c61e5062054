"""Command lines of the benchmarks, and what all of them share."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.support import with_block

FOLDER = Path(__file__).parents[2] / "benchmarks"
SLOW = {"gpu"}
"""Commands that load kernels or PyTorch first."""
COMMANDS = {path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text()}
COMMANDS |= {path.parent.name for path in FOLDER.glob("*/__main__.py")}

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
    names = sorted(COMMANDS - SLOW)
    processes = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, f"benchmarks.{name}"], stdout=subprocess.PIPE, text=True)
        for name in names
    ]
    assert len(names) > 6
    for name, process in zip(names, processes, strict=True):
        printed, _ = process.communicate(timeout=120)
        assert (name, process.returncode) == (name, 0)
        assert printed.startswith("usage: ")


def test_only_a_block_is_replaced():
    text = "before\n<!-- evidence: a -->\nold\n<!-- end -->\nafter <!-- end -->\n"
    assert with_block(text, "evidence: a", "new\n") == text.replace("old", "new")
    with pytest.raises(ValueError, match="evidence: b"):
        with_block(text, "evidence: b", "new\n")
