"""The protocol definition is well formed, and compatible with the baseline of the last release."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROTO = Path("protos/ssd/drafter/v1/drafter.proto")
BASELINE = Path("protos/baseline.binpb")


@pytest.fixture(scope="module")
def buf():
    """Return a function that runs buf: $BUF, next to this Python (the dev extra), on the path, or from npm."""
    folders = (Path(sys.executable).parent, os.environ.get("PATH", ""), ROOT / "node_modules" / ".bin")
    program = os.environ.get("BUF") or shutil.which("buf", path=os.pathsep.join(map(str, folders)))
    if program is None:
        pytest.skip("buf is not installed; pip install buf-bin")

    def run(folder, *arguments):
        return subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True, timeout=60)

    return run


@pytest.mark.parametrize(
    "arguments", [("lint",), ("format", "--diff", "--exit-code"), ("breaking", "--against", str(BASELINE))]
)
def test_the_contract_is_well_formed_formatted_and_compatible_with_the_baseline(buf, arguments):
    done = buf(ROOT, *arguments)
    assert done.returncode == 0, f"{done.stdout}\nafter a release that may break: make protos-baseline"


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("  bytes parents = 2;", "  bytes ancestors = 2;", "changed name"),
        ("  rpc Observe(ObserveRequest) returns (ObserveResponse);\n", "", "was deleted"),
        ("returns (stream DraftResponse)", "returns (DraftResponse)", "server streaming"),
    ],
)
def test_an_incompatible_change_is_found(buf, tmp_path, before, after, complaint):
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    text = (tmp_path / PROTO).read_text()
    assert before in text
    (tmp_path / PROTO).write_text(text.replace(before, after, 1))
    done = buf(tmp_path, "breaking", "--against", str(BASELINE))
    assert done.returncode == 100
    assert complaint in done.stdout
