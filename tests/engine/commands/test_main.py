"""The command `ssd-engine`, and how long its threads wait."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.commands import main

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


def test_commands_import_no_more_than_they_need():
    """The help page imports neither torch nor numba; the HTTP process does without torch; OpenMP is set up before."""
    script = """if True:
        import sys
        from click.testing import CliRunner
        from engine.commands import main
        result = CliRunner().invoke(main.cli, ["--help"])
        assert result.exit_code == 0, result.output
        assert not {"numba", "torch", "grpc", "numpy"} & set(sys.modules), sorted(sys.modules)
        import engine.api.server
        assert "torch" not in sys.modules
        main.limit_spinning = lambda environment: print("torch" in sys.modules)
        assert CliRunner().invoke(main.cli, ["generate", "--help"]).output.startswith("False")
    """
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


def stat(ticks, idle, busy):
    """/proc/stat with two usable processors, 1 and 3, and others; half of the idle ticks waited for a device."""
    rows = (f"cpu{number} {busy} 0 0 {idle // 2} {idle // 2} 0 0 0 0 0" for number in (1, 3))
    return "\n".join([f"cpu  9 9 9 {ticks} 9 9 9 9 0 0", *rows, f"cpu10 {ticks} 9 9 9 9 9 9 9 9 9", "intr 1 2 3\n"])


@pytest.mark.parametrize(
    ("idle", "busy", "environment", "limits"),
    [
        (10, 0, {}, False),
        (8, 2, {}, False),  # Background load is not contention.
        (6, 4, {}, True),
        (0, 10, {}, True),
        (0, 0, {}, False),  # no tick
        (0, 10, {"OMP_NUM_THREADS": "1"}, False),
        (0, 10, {"OMP_NUM_THREADS": "2"}, True),
        (0, 10, {"OMP_NUM_THREADS": "all"}, True),
        (0, 10, {"OMP_NUM_THREADS": "2,1"}, True),
        (10, 0, {"OMP_NUM_THREADS": "3"}, True),
        (0, 10, {"GOMP_SPINCOUNT": "active"}, False),
        (0, 10, {"OMP_WAIT_POLICY": "active"}, False),
    ],
)
def test_threads_do_not_spin_if_they_exceed_the_free_processors(monkeypatch, idle, busy, environment, limits):
    monkeypatch.setattr(main, "usable_processors", lambda: {1, 3})
    monkeypatch.setattr(main.time, "sleep", lambda _: None)
    stats = iter([stat(7, 1000, 500), stat(9000, 1000 + idle, 500 + busy)])
    chosen = dict(environment)
    main.limit_spinning(chosen, lambda: next(stats))
    assert chosen == environment | ({"GOMP_SPINCOUNT": main.NO_SPINNING} if limits else {})
