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

PLANTED = {
    "a field of another type": ("uint64 step = 1;", "string step = 1;", "changed type"),
    "a field of another number": ("repeated Start starts = 3;", "repeated Start starts = 30;", "deleted"),
    "a removed field": ("  bytes accept_prob = 3;\n", "", "was deleted"),
    "a field of another name": ("  bytes parents = 2;", "  bytes ancestors = 2;", "changed name"),
    "a removed call": ("  rpc Observe(ObserveRequest) returns (ObserveResponse);\n", "", "was deleted"),
    "a stream that becomes a message": (
        "returns (stream DraftResponse)",
        "returns (DraftResponse)",
        "server streaming",
    ),
}


def find_buf():
    """Return the command of buf: $BUF, next to this Python (the dev extra), on the path, or from npm."""
    folders = [
        Path(sys.executable).parent,
        *os.environ.get("PATH", "").split(os.pathsep),
        ROOT / "node_modules" / ".bin",
    ]
    return os.environ.get("BUF") or shutil.which("buf", path=os.pathsep.join(map(str, folders)))


@pytest.fixture(scope="module")
def buf():
    program = find_buf()
    if program is None:
        pytest.skip("buf is not installed; pip install buf-bin")

    def run(folder, *arguments):
        return subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture
def copy(tmp_path):
    """Return the folder of a copy of the protocol definition and its settings, which a test may change."""
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    return tmp_path


def change(copy, before, after):
    text = (copy / PROTO).read_text()
    assert before in text
    (copy / PROTO).write_text(text.replace(before, after, 1))


@pytest.mark.parametrize(
    "arguments", [("lint",), ("format", "--diff", "--exit-code"), ("breaking", "--against", str(BASELINE))]
)
def test_the_contract_is_well_formed_formatted_and_compatible_with_the_baseline(buf, arguments):
    done = buf(ROOT, *arguments)
    assert done.returncode == 0, f"{done.stdout}\nafter a release that may break: make protos-baseline"


@pytest.mark.parametrize(("before", "after", "complaint"), PLANTED.values(), ids=PLANTED)
def test_an_incompatible_change_is_found(buf, copy, before, after, complaint):
    change(copy, before, after)
    done = buf(copy, "breaking", "--against", str(BASELINE))
    assert done.returncode == 100
    assert complaint in done.stdout


def test_a_new_field_is_compatible_and_bad_style_is_found(buf, copy):
    change(copy, "message Error {", "message Error {\n  // A further explanation.\n  string link = 99;")
    done = buf(copy, "breaking", "--against", str(BASELINE))
    assert done.returncode == 0, done.stdout
    change(copy, "string link = 99;", "string Link = 99;")
    done = buf(copy, "lint")
    assert done.returncode == 100
    assert 'Field name "Link" should be lower_snake_case' in done.stdout
