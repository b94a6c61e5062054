"""Commands in this process."""

import io
import sys

import pytest

from engine.commands import main as cli
from engine.executor import build, shapes
from tests.curves import line


@pytest.fixture(autouse=True)
def steps_of_one_duration(monkeypatch):
    """Replace the measurement at the start of an engine, which takes seconds; servers of other tests measure."""
    for module in (build, shapes):
        monkeypatch.setattr(module, "measured_curve", lambda *_, **__: line(0.01))


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line in this process; returns exit code, stdout and stderr."""

    def run(*arguments, stdin=None):
        monkeypatch.setattr(sys, "argv", ["ssd-engine", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", stdin if isinstance(stdin, io.StringIO) else io.StringIO(stdin or ""))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run
