"""The examples run: programs in Python, and a client in C++ that follows the protocol."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.engine.api.serving import eventually, serving

EXAMPLES = Path(__file__).parent.parent / "examples"
CONFORMANCE = (sys.executable, "-m", "drafter_service.commands.main", "conformance")


@pytest.fixture
def figures(monkeypatch, capsys):
    """Return a function that runs an example in Python in this process, which has imported the engine already.

    It returns the output of the example, and the numbers with a decimal point in it.
    """

    def run_example(example, *arguments):
        path = str(EXAMPLES / f"{example}.py")
        monkeypatch.setattr(sys, "argv", [path, *arguments])
        runpy.run_path(path, run_name="__main__")
        output = capsys.readouterr().out
        return output, [float(number) for number in re.findall(r"\d+\.\d+", output)]

    return run_example


@pytest.mark.parametrize("example", ["own_drafter", "rollouts", "transformers_generate"])
def test_the_second_run_has_more_tokens_per_step(figures, example):
    _, (first, second) = figures(example)
    assert second > first >= 1


def test_the_steps_of_a_request_are_printed_and_drawn(figures, tmp_path):
    output, (tokens_per_step,) = figures("first_drafts", "--svg", str(tmp_path / "drafts.svg"))
    steps = re.findall(r"^ +\d+ +(\d+) of +(\d+) ", output, re.MULTILINE)
    accepted = sum(int(count) for count, _ in steps)
    assert tokens_per_step == round((accepted + len(steps)) / len(steps), 1) > 2
    assert steps[0] == ("5", "5")  # As in docs/start.md: the first answer is in the corpus.
    assert all(int(count) <= int(drafted) for count, drafted in steps)
    drawing = ElementTree.parse(tmp_path / "drafts.svg").getroot()
    assert "find_files" in "".join(drawing.itertext())
    assert len(drawing.findall(".//{*}g/{*}rect")) > accepted / 2  # Line breaks have no mark.


def test_the_client_of_openai_is_drafted_from_its_own_output(figures):
    def drafted():
        """Return the text of an answer, once later ones were drafted; on a busy machine drafting may not pay."""
        output, tokens_per_step = figures("openai_client", f"{server.url}/v1")
        assert len(tokens_per_step) == 2
        return output if min(tokens_per_step) > 2 else None

    with serving() as server:
        assert "items" in eventually(drafted)


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


def run(program, address, times, *deadline_ms):
    """Run the example; return its number of steps in each run."""
    arguments = [program, address.removeprefix("unix:"), str(times), *deadline_ms]
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
    """Steps wait for their drafts, which on a busy machine may take longer than a step."""
    first, *later = run(cpp_engine, socket_address, 5, "30000")
    assert min(later) < first


def test_the_cpp_engine_runs_without_a_service(cpp_engine, socket_address):
    assert run(cpp_engine, socket_address, 1) == [200]
