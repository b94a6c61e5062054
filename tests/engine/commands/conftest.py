"""Commands in this process."""

import io
import json
import sys
from types import SimpleNamespace

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


@pytest.fixture
def generate(run, model_folder, tmp_path):
    """Run `generate` on the tiny model, and return what it wrote.

    `records`: all completions; `drafts`: the figures of their drafts, which `records` lack, since they may differ
    between runs; `out`; `err`, without line breaks.
    """

    def generate(*arguments, model=model_folder, status=0, stdin=None):
        file = tmp_path / "out.jsonl"
        file.unlink(missing_ok=True)
        writes = () if "--out" in arguments else ("--out", file)
        code, out, err = run("generate", "--model", model, *writes, *arguments, stdin=stdin)
        assert code == status, err
        records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        drafts = [record.pop("draft") for record in records]
        return SimpleNamespace(records=records, drafts=drafts, out=out, err=" ".join(err.split()))

    return generate


@pytest.fixture
def printed(run, model_folder):
    """Return what `generate` prints for the tiny model."""
    return lambda *arguments: run("generate", "--model", model_folder, *arguments)[1]
