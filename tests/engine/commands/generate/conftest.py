"""The `generate` command in this process."""

import io
import sys

import pytest

from engine.commands import main as cli


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
