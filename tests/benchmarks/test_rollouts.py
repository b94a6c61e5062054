import json
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.rollouts.problems import STATEMENTS, Problem, read_problems
from ssd.replay import Recording
from tests.engine.steps import accepting

HEAD = "    def add(self, left, right):\n"
FULL = "".join(f"        value{number} = left + right\n" for number in range(STATEMENTS))
TINY = ("--problems", "2", "--samples", "2", "--max-tokens", "20", "--steps", "2")


@pytest.fixture
def problem():
    return Problem("file.py:add:1", f"class A:\n\n{HEAD}", HEAD, ("left", "right"))


@pytest.fixture
def command(tmp_path, capsys):
    """Return a function that runs the command line and returns its document."""
    pytest.importorskip("trl", reason="`make rollouts` installs TRL")
    from benchmarks.rollouts.__main__ import main

    def run(*arguments):
        with suppress(SystemExit):  # depends on times
            main([*TINY, "--out", str(tmp_path / "rollouts.json"), *arguments])
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def test_the_reward_is_that_of_a_function_that_is_complete_and_uses_its_arguments(problem):
    assert problem.reward(FULL, is_complete=True) == 1.0
    assert problem.reward(FULL.replace("right", "1"), is_complete=True) == 0.75
    assert problem.reward(FULL + "        value", is_complete=False) == 0.5
    half = "".join(FULL.splitlines(keepends=True)[: STATEMENTS // 2])
    assert problem.reward(half * 2, is_complete=True) == 0.5


def test_text_after_the_function_does_not_count_and_invalid_python_has_no_reward(problem):
    assert problem.reward(FULL + "\n    other = (", is_complete=False) == 1.0
    assert problem.reward(FULL + "        value = (\n", is_complete=True) == 0.0
    assert problem.reward("", is_complete=True) == 0.0


def test_outputs_end_before_the_next_definition(problem):
    assert "\n    def " in problem.stop
    assert "\nclass " in problem.stop


def test_problems_are_functions_with_arguments_that_differ():
    problems = read_problems(64)
    assert len({problem.group for problem in problems}) == len({problem.prompt for problem in problems}) == 64
    assert all(problem.arguments and problem.prompt.endswith(problem.head) for problem in problems)
    with pytest.raises(ValueError, match="not 1000"):
        read_problems(1000)


def test_drafts_change_nothing_but_time(command, tmp_path):
    result = command("--trace", str(tmp_path / "rollouts.npz"))
    assert result["differences"] == []
    assert sum(step["accepted"] for step in result["steps"]) > 0
    assert json.loads((tmp_path / "rollouts.json").read_text()) == result

    trace = Recording.load(tmp_path / "rollouts.npz")
    assert trace.output_tokens == sum(step["output_tokens"] for step in result["steps"])
    with np.load(tmp_path / "rollouts.npz") as arrays:
        assert arrays["group"].tolist() == [0, 0, 1, 1] * 2
        assert arrays["version"].tolist() == [0] * 4 + [1] * 4


def test_two_engines_with_one_sidecar_change_nothing_but_time(command):
    result = command("--engines", "2")
    assert (result["drafter"], result["differences"]) == ("ssd-remote", [])


def test_drafts_that_are_accepted_unverified_are_noticed(command, monkeypatch):
    fault = accepting(lambda draft, *_: range(len(draft)))
    monkeypatch.setattr("engine.speculation.verify.accept_exactly", fault)
    assert_all_differ(command())


def test_another_seed_is_noticed(command, monkeypatch):
    from benchmarks.rollouts.engines import RolloutEngine

    build = RolloutEngine.__init__

    def build_other(self, settings, drafter, address=""):
        build(self, replace(settings, seed=int(drafter != "none")), drafter, address)

    monkeypatch.setattr(RolloutEngine, "__init__", build_other)
    assert_all_differ(command())


def assert_all_differ(result):
    for name in ("outputs", "rewards", "losses", "weights"):
        assert any(name in text for text in result["differences"])
    assert result["targets"][0]["met"] is False
