"""The examples in other languages are built, and follow the protocol."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
CONFORMANCE = (sys.executable, "-m", "drafter_service.commands.main", "conformance")


@pytest.fixture(scope="module")
def cpp_engine(tmp_path_factory):
    """Return the path of the built example."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler is installed")
    program = tmp_path_factory.mktemp("cpp") / "engine"
    source = EXAMPLES / "cpp" / "engine.cpp"
    flags = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror")
    subprocess.run([compiler, *flags, "-o", program, source], check=True, timeout=120)
    return program


def run(program, address, times):
    """Run the example; return its number of steps in each run."""
    arguments = [program, address.removeprefix("unix:"), str(times)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=True)
    return [int(steps) for steps in re.findall(r"(\d+) steps for 200 tokens", done.stdout)]


def test_the_cpp_engine_passes_the_conformance_test(cpp_engine, socket_address):
    command = [*CONFORMANCE, "--listen", socket_address, "--idle", "20"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as examination:
        assert "listening at" in examination.stdout.readline()
        run(cpp_engine, socket_address, 10)
        output = examination.communicate(timeout=60)[0]
    assert examination.returncode == 0, output
    assert "pass  step times" in output


def test_the_cpp_engine_is_served(cpp_engine, socket_address, server):
    steps = run(cpp_engine, socket_address, 3)
    assert steps[2] < steps[0] / 2


def test_the_cpp_engine_runs_without_a_service(cpp_engine, socket_address):
    assert run(cpp_engine, socket_address, 1) == [200]
