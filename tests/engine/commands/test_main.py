"""The command `ssd-engine`."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.commands import main

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


def test_help_imports_nothing_heavy():
    """The help page imports neither torch nor numba."""
    script = (
        "import sys; from click.testing import CliRunner; from engine.commands.main import cli;"
        "result = CliRunner().invoke(cli, ['--help']); assert result.exit_code == 0, result.output;"
        "assert not {'numba', 'torch', 'grpc', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize("group", [[], ["train"]])
def test_summaries_of_commands_are_not_cut(group):
    commands = CliRunner().invoke(main.cli, [*group, "--help"]).output.partition("Commands:\n")[2]
    assert commands
    assert "..." not in commands


def test_the_checked_modules_are_those_of_the_extra():
    extras = PROJECT["optional-dependencies"]
    names = {re.match(r"[\w-]+", each)[0].replace("-", "_") for each in extras["engine"] + extras["text"]}
    assert names - {"ssd_drafter"} == set(main.MODULES)


@pytest.mark.parametrize(
    "arguments", [["generate", "--unknown"], ["compare", "--drafter", "unknown"], ["train", "mtp"]]
)
def test_a_missing_extra_is_reported_before_other_errors(monkeypatch, arguments):
    monkeypatch.setattr(main, "find_spec", lambda module: None if module in ("torch", "uvicorn") else module)
    result = CliRunner().invoke(main.cli, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "error: ssd-engine needs torch, uvicorn; run in the source folder of ssd-drafter: pip install '.[engine]'\n"
    )
    assert CliRunner().invoke(main.cli, [*arguments[:1], "--help"]).exit_code == 0


@pytest.mark.parametrize("command", ["ssd-engine", "ssd-drafter"])
def test_an_interruption_while_modules_are_imported_is_one_line(command, tmp_path):
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt\n")
    module, _, function = PROJECT["scripts"][command].partition(":")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from {module} import {function}; {function}()"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


def test_an_interruption_is_one_line(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.commands.generate.run_generate", interrupt)
    result = CliRunner().invoke(main.cli, ["generate", "x"])
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
